r"""Private GP-UCB: a bandit whose shared posterior is all that anybody learns [Dubey2021]_.

    message     from -> to       content                                       readable by
    Setup       server -> agent  search space, features, trust, noise, rule    all
    Parameters  server -> agent  the newest sum of statistics, D numbers       all agents
    Query       server -> agent  the round; the action, if actions are public  that agent
    Record      agent -> server  an action and its outcome                     server
    Increment   agent -> server  the statistics of both, with noise            server
    Outcome     agent -> server  the outcome of the public action              server

Rounds are 1 to `T`. In each the server asks `batch` agents, in turn, to play one action. An agent
knows the newest release, from which it makes the posterior that everybody has, and plays the action
of its own decision set that promises most. Round `t` acts on what rounds before it have brought.

    trust       an agent sends   who adds noise                     chooses the action
    "joint"     Record           the server, to the sum of all      the agent
    "local"     Increment        the agent, to its own statistics   the agent
    "public"    Outcome          the server, to a block's outcomes  the server
    "none"      Record           nobody                             the agent

With public actions the decision set is fixed and public. An action is played until its block is
complete, by several agents and over several rounds if need be, and the sum of the block's outcomes
is released once. Absent agents' outcomes are missing, and the block waits; what is unfinished at
the end is never released.

Guarantee: for public settings, times of asking and answering, in two worlds that differ in one unit
(a record, or all records of an agent, bounded by how often it is asked) everything that all others
see in the whole run is :math:`(\epsilon, \delta)`-indistinguishable: "joint" by `privacy.tree`, all
releases being one Gaussian mechanism; "local" by `privacy.increments`, for the server as well;
"public" likewise for outcomes alone, because an action is a function of earlier releases. An action
depends on releases and on the agent's decision set, so what is released may choose what is recorded
(adaptive inputs). The posterior is post-processing: `parameters_model` is anybody's, at any time.

Trust: with "joint" and "public" the server is the privatizer: it sees records, and keeps sums
without noise in `secrets`, apart from its record. With "local" nobody is trusted; a site pays from
its own ledger. Not covered: whoever sees an agent's own queries and replies, and the action that is
played with respect to the agent's own decision set; settings tuned on the data; how many records a
round has, who answers and how long that takes.

Regret: the theorem of [Dubey2021]_ is about UCB with its own width :math:`\beta_t` (`norm_bound`)
and ``psd="shift"``. A constant `exploration`, the floor, expected improvement and Thompson sampling
carry none, and do better: half to one is a good constant, and the width of the theorem costs half
of random play.

Differs from the paper:

- one Gaussian mechanism with the exact sensitivity, outcomes clipped to a public range and centred,
  square-root factorisation, and a basis of few features (`privacy.tree` lists its corrections);
- clients send their increment; in Algorithm 3 the running sum leaves with the noise of its last
  increment only (`privacy.increments`);
- scores are :math:`\mu + \beta\sigma`, of a posterior with its eigenvalues floored at the height of
  the noise, and ties are broken at random;
- public actions are not in the paper.

.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
   AISTATS 2021.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from secrets import token_hex
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.acquisition import AdditiveGrid, private_ucb_width
from botorch_fed.acquisition.optimize import ascend
from botorch_fed.errors import BudgetExceeded, MessageError, NumericalError, ProtocolError
from botorch_fed.federation.disclosure import ADDRESSEE, EVERYBODY, Price, Row, Sees
from botorch_fed.models import (
    AdditiveFeatures,
    BasisGP,
    FeatureMap,
    LogWarp,
    Summary,
    WeightPosterior,
    feature_map_from_tensors,
    noise_floor,
    noise_norm_bound,
    noise_shift,
    repair_total,
)
from botorch_fed.privacy import (
    Adjacency,
    BlockRelease,
    BlockState,
    BlockSum,
    Budget,
    Entry,
    Event,
    Guarantee,
    Ledger,
    LedgerFile,
    LocalGaussian,
    NoiseSource,
    OSNoise,
    PrefixState,
    PrefixSum,
    RecordStatistic,
    Unit,
    compose,
    noise_multiplier_for,
)
from botorch_fed.privacy.tree import Factorization
from botorch_fed.protocols.base import AgentId, LedgerElsewhere, Outbox, Pending
from botorch_fed.protocols.budget import Budgeted
from botorch_fed.protocols.fts import FTS, check_agreement, received_features
from botorch_fed.protocols.own_step import check_points, random_point, tensor_hash
from botorch_fed.protocols.site import STATE_BYTES
from botorch_fed.protocols.store import Blobs, MemoryBlobs, MemoryStore, Store
from botorch_fed.protocols.transfer_search import (
    TransferSearch,
    default_private_features,
    reference_points,
)
from botorch_fed.rng import Generator, generator
from botorch_fed.space import SearchSpace
from botorch_fed.wire.codec import MAX_BYTES, content_hash, decode, encode

logger = logging.getLogger(__name__)

Trust = Literal["joint", "local", "public", "none"]
AcquisitionName = Literal["ucb", "thompson", "ei"]
PSD = Literal["floor", "shift"]
Mechanism = PrefixSum | LocalGaussian | BlockSum
DecisionSets = Callable[[int], Tensor]  # a round to `K x d` points of the unit cube

MAX_ROUNDS = 10**8
MAX_OUTCOME = 1e6  # on the public scale: no public range is wider
MAX_NUMBER = 1e15  # of what is released: beyond it nothing is a sum of clipped statistics
MAX_NOISE = 64.0  # standard deviations that noise never exceeds
NUM_RAW = 1000  # points of the cube that are looked at
NUM_STARTS = 20  # of the best of them, which are improved
NUM_GRID_STARTS = 3  # of these, for additive functions coordinate by coordinate first
GRID_POINTS = 81
FAILURE = 0.1  # probability with which the theorem's width may fail
SHARE = 20  # a block takes at most one in so many of all outcomes

_Secret = TypeVar("_Secret")


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, eq=False)
class Setup:
    r"""What all agents agree upon, in public.

    Attributes:
        space: The map of inputs and outcomes.
        features: The shared basis, as `FeatureMap.to_tensors` gives it.
        trust: Who adds noise, see the module.
        noise_var: :math:`\rho^2`, the variance of one outcome on the public scale.
        outcome_bound: :math:`Y`: outcomes on the public scale are clipped to :math:`\pm Y`.
        moment_scale: :math:`\kappa` of the statistics.
        noise_multiplier: :math:`z` of the mechanism, 0 without noise.
        adjacency: What a neighbouring world is.
        unit: Whose data are protected.
        horizon: How many rounds there are.
        exploration: Of a score: deviations added to the mean (``"ucb"``), or of a drawn function
            from it (``"thompson"``).
        acquisition: What is maximised; ``"ei"`` is the improvement over the best posterior mean.
        psd: How a noisy matrix is made positive: eigenvalues raised to a ``"floor"``, or by a
            ``"shift"``.
        height: Of the floor, see `models.repair.noise_floor`.
        inflate: Whether the posterior knows of the noise in the moment. Not with a shift.
        norm_bound: `B` of the theorem, whose width then takes the place of `exploration`; 0 for
            the constant. For ``"ucb"`` with a ``"shift"``.
        promise: What the whole run reveals about one unit at most; None if it is not private.
    """

    space: SearchSpace
    features: Mapping[str, Tensor]
    trust: Trust
    noise_var: float
    outcome_bound: float
    moment_scale: float
    noise_multiplier: float
    adjacency: Adjacency
    unit: Unit
    horizon: int
    exploration: float
    acquisition: AcquisitionName
    psd: PSD
    height: float
    inflate: bool
    norm_bound: float
    promise: Guarantee | None

    def __post_init__(self) -> None:
        for name, kind in (("trust", Trust), ("acquisition", AcquisitionName), ("psd", PSD)):
            if getattr(self, name) not in get_args(kind):
                raise InputDataError(
                    f"{name} is one of {get_args(kind)}, got {getattr(self, name)!r}."
                )
        if not 1e-12 <= self.noise_var <= 1e6:
            raise InputDataError(f"noise_var must lie between 1e-12 and 1e6, got {self.noise_var}.")
        if not 1e-6 <= self.outcome_bound <= 1e6:
            raise InputDataError(
                f"outcome_bound must lie between 1e-6 and 1e6, got {self.outcome_bound}."
            )
        if not (0 <= self.exploration <= 1e6 and 0 <= self.height <= 1e6):
            raise InputDataError(
                "exploration and height must lie between 0 and 1e6, got "
                f"{self.exploration} and {self.height}."
            )
        if not 1 <= self.horizon <= MAX_ROUNDS:
            raise InputDataError(f"There must be 1 to 10^8 rounds, got {self.horizon}.")
        if self.inflate and self.psd == "shift":
            raise InputDataError('inflate needs eigenvectors, psd="shift" has none: use "floor".')
        if not 0 <= self.norm_bound <= 1e6:
            raise InputDataError(f"norm_bound must lie between 0 and 1e6, got {self.norm_bound}.")
        if self.norm_bound and (self.acquisition, self.psd) != ("ucb", "shift"):
            raise InputDataError(
                'The theorem is about acquisition="ucb" with psd="shift", got '
                f"{self.acquisition!r} with {self.psd!r}: leave norm_bound out."
            )
        none = self.noise_multiplier == 0
        if (self.trust == "none") != none or not 0 <= self.noise_multiplier < math.inf:
            raise InputDataError(
                'A noise multiplier is positive, and 0 with trust="none" and only there, got '
                f"{self.noise_multiplier}."
            )
        if self.trust == "none" and self.promise is not None:
            raise InputDataError('A run with trust="none" promises nothing.')
        _ = self.statistic_of(1)  # refuses a moment_scale that no statistic has

    def statistic_of(self, num_features: int) -> RecordStatistic:
        """What one record adds to a sum over so many features."""
        return RecordStatistic(
            num_features=num_features,
            outcome_bound=self.outcome_bound,
            moment_scale=self.moment_scale,
        )


@dataclass(frozen=True, eq=False)
class Parameters:
    r"""The newest release: what everybody knows, and all that anybody needs for the posterior.

    Attributes:
        t: After which round it was made.
        values: The sum of statistics, `D` numbers. With public actions every block is one record of
            weight :math:`\rho^2/v`, `v` the variance of its mean, noise included.
        noise_std: The standard deviation of the noise in each of them; 0 where weights know it.
        count: How many outcomes it is made of.
    """

    t: int
    values: Tensor
    noise_std: float
    count: int


@dataclass(frozen=True, eq=False)
class Query:
    """Play one action in round `t`; `X` is the action, `1 x d`, if actions are public."""

    t: int
    X: Tensor | None


@dataclass(frozen=True, eq=False)
class Record:
    """An action `X`, `1 x d` of the unit cube, and its outcome `Y`, `1 x 1` on the public scale."""

    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class Increment:
    """The statistics of one record, with all of their noise: `D` numbers."""

    values: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of the public action, `1 x 1` on the public scale."""

    Y: Tensor = field(repr=False)


# ------------------------------------------------------------------ the posterior of a release


def scale_of(feature_map: FeatureMap) -> float:
    r"""The prior variance :math:`s_0^2` by which squared features are divided in a statistic."""
    return float(feature_map.outputscale.sum())


def unit_features(feature_map: FeatureMap, X: Tensor) -> Tensor:
    """Features of `n x d` points, `n x m`, of norm at most one up to rounding."""
    return feature_map(X).detach() / math.sqrt(scale_of(feature_map))


def private_summary(setup: Setup, feature_map: FeatureMap, parameters: Parameters) -> Summary:
    """What a release says about the weights: made positive by `models.repair`.

    Args:
        setup: Of the run.
        feature_map: The basis of the setup.
        parameters: A release.

    Raises:
        NumericalError: It is no posterior, even so.
    """
    return _posterior_of(setup, feature_map, parameters)[0]


def parameters_model(setup: Setup, parameters: Parameters | None) -> BasisGP:
    """The posterior of a release as a BoTorch model; anybody may have it, at any time.

    Args:
        setup: Of the run.
        parameters: A release; None for the prior.

    Returns:
        A model on the unit cube, of outcomes on the public scale.

    Example:
        >>> model = parameters_model(setup, parameters)
        >>> UpperConfidenceBound(model, beta=0.25)
    """
    phi = feature_map_from_tensors(setup.features)
    total = Summary.zero(phi) if parameters is None else private_summary(setup, phi, parameters)
    return BasisGP.from_summary(total, feature_map=phi, noise_var=setup.noise_var)


def _posterior_of(
    setup: Setup, phi: FeatureMap, parameters: Parameters
) -> tuple[Summary, WeightPosterior]:
    m, scale = phi.num_features, scale_of(phi)
    statistic = setup.statistic_of(m)
    gram, moment = statistic.gram_and_moment(
        parameters.values, noise_var=setup.noise_var, outputscale=scale
    )
    total = Summary(gram, moment, phi.fingerprint)
    std, unit = parameters.noise_std, scale / setup.noise_var
    if std == 0:
        return total, WeightPosterior.from_total(total)
    if setup.psd == "shift":
        shift = noise_shift(std, m, horizon=setup.horizon, failure=FAILURE / 2) * unit
        total = repair_total(total, shift=shift)
        try:
            return total, WeightPosterior.from_total(total)
        except NumericalError:  # noise that is rarer than the shift allows for
            total = repair_total(total)
            return total, WeightPosterior.from_total(total)
    moment_std = 0.0
    if setup.inflate:
        moment_std = statistic.moment_noise_std(std, noise_var=setup.noise_var, outputscale=scale)
    floor = noise_floor(std, m, height=setup.height) * unit
    total = repair_total(total, moment_noise_std=moment_std, floor=floor)
    return total, WeightPosterior.from_total(total)


@dataclass(frozen=True, eq=False)
class _View:
    """A release as everybody reads it."""

    setup: Setup
    phi: FeatureMap
    total: Summary
    posterior: WeightPosterior
    parameters: Parameters

    @classmethod
    def of(cls, setup: Setup, phi: FeatureMap, parameters: Parameters) -> _View:
        return cls(setup, phi, *_posterior_of(setup, phi, parameters), parameters)

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latent function at `n x d` points, `n` each."""
        Phi = self.phi(X)
        mean, root = self.posterior.predict(Phi)
        variance = root.square().sum(dim=-1)
        if self.phi.has_residual:
            points, features = X.unsqueeze(-2), Phi.unsqueeze(-2)
            variance = variance + self.phi.residual(points, Phi1=features).flatten()
        return mean.squeeze(-1), variance.clamp_min(1e-30).sqrt()

    def score(self, arms: Tensor | None, stream: Generator) -> Callable[[Tensor], Tensor]:
        """What is maximised: `n x d` points to `n` values."""
        setup = self.setup
        if setup.acquisition == "thompson":
            weights = self.posterior.sample(scale=setup.exploration, generator=stream)
            return lambda X: self.phi(X) @ weights
        if setup.acquisition == "ei":
            points = reference_points(self.phi.input_dim) if arms is None else arms
            with torch.no_grad():
                best = self.predict(points)[0].max()
            model = BasisGP.from_summary(self.total, feature_map=self.phi)
            improvement = LogExpectedImprovement(model, best_f=best)
            return lambda X: improvement(X.unsqueeze(-2))

        width = self.width

        def bound(X: Tensor) -> Tensor:
            mean, std = self.predict(X)
            return mean + width * std

        return bound

    @cached_property
    def width(self) -> float:
        """How many standard deviations the upper confidence bound reaches."""
        setup, phi, parameters = self.setup, self.phi, self.parameters
        if not setup.norm_bound:
            return setup.exploration
        m, scale, std = phi.num_features, scale_of(phi), parameters.noise_std
        gram_bound = moment_bound = 0.0
        if std > 0:
            # The matrix may fail with half of the probability, moment and outcomes with a quarter.
            gram_bound = noise_norm_bound(std, m, horizon=setup.horizon, failure=FAILURE / 2)
            tail = math.sqrt(2 * math.log(4 * setup.horizon / FAILURE))
            largest = std / setup.moment_scale * (math.sqrt(m) + tail)
            moment_bound = largest / math.sqrt(gram_bound)  # in the norm of the shifted noise
        # For features of norm one the prior's precision is λ over the prior variance.
        ridge = setup.noise_var / scale
        eye = torch.eye(m, dtype=torch.float64)
        return private_ucb_width(
            ridge * (eye + self.total.gram),
            t=parameters.t + 1,
            norm_bound=setup.norm_bound * math.sqrt(scale),
            noise_std=math.sqrt(setup.noise_var),
            noise_var=ridge,
            gram_noise_bound=gram_bound,
            moment_noise_bound=moment_bound,
            failure=FAILURE / 2,
        )


def _action(
    view: _View | None, space: SearchSpace, arms: Tensor | None, *, seed: int, t: int
) -> Tensor:
    """The action of round `t`, `1 x d`: the best of the arms or of the cube, ties at random.

    Without a release it is uniform.
    """
    if view is None:
        point = random_point(space, arms, generator(seed, "arm", t))
        return point if arms is not None else space.snap(point)
    score = view.score(arms, generator(seed, "score", t))
    if arms is not None:
        order = generator(seed, "ties", t).uniform(len(arms)).argsort(stable=True)
        with torch.no_grad():
            values = torch.nan_to_num(score(arms[order]), nan=-torch.inf)
            best = int(order[int(values.argmax())])
        return arms[best : best + 1].clone()
    raw = generator(seed, "point", t).uniform(NUM_RAW, space.dim)
    raw[1::2] = LogWarp(space.log_offsets).untransform(raw[1::2])
    with torch.no_grad():
        values = score(raw)
    starts = raw[values.topk(NUM_STARTS).indices]
    grid = _grid(view.phi) if view.setup.acquisition == "ucb" else None
    if grid is not None:
        points = [
            grid.maximize_ucb(
                view.posterior,
                exploration=view.width,
                generator=generator(seed, "grid", t, i),
                start=starts[i : i + 1],
            )[0]
            for i in range(NUM_GRID_STARTS)
        ]
        starts = torch.cat([*points, starts[NUM_GRID_STARTS:]])
    found, found_values = ascend(score, starts, *space.bounds)
    best = int(torch.nan_to_num(torch.cat([found_values, values]), nan=-torch.inf).argmax())
    return space.snap(torch.cat([found, raw])[best : best + 1])


@lru_cache(maxsize=4)
def _grid(phi: FeatureMap) -> AdditiveGrid | None:
    """For sums of functions of one input each; None for other maps."""
    if not isinstance(phi, AdditiveFeatures) or any(len(group) != 1 for group in phi.groups):
        return None
    return AdditiveGrid(phi, torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64))


# ------------------------------------------------------------------ the agent


@dataclass(frozen=True, eq=False)
class PrivateUCBAgentState:
    """An agent's private state.

    Attributes:
        t: The round of its last query.
        step: What is still to be done in it.
        setup: Hash of the `Setup`.
        parameters: Hash of the `Parameters`, if there are any.
        action: The public action, `1 x d`, if actions are public.
        X: What it has played and not yet told anybody, `1 x d`.
        Y: The outcome on the public scale, `1 x 1`.
        releases: How many increments it has sent.
        ledger: What they have cost; None before the first request.
    """

    t: int
    step: Literal["query", "rest"]
    setup: str
    parameters: str | None
    action: Tensor | None
    X: Tensor | None = field(repr=False)
    Y: Tensor | None = field(repr=False)
    releases: int
    ledger: Ledger | None


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateUCBAgent:
    """One site, or one user, of private GP-UCB.

    Args:
        name: Its name; the server's roster has it.
        space: The map of inputs and outcomes; must be the server's.
        seed: Its own seed, private.
        decision_sets: What it may play, private: the round of the query (from 1 on) to arms, `K x
            d` points of the unit cube; the same round, the same arms.
        candidates: What it may play if that is the same in all rounds; default the whole unit cube.
        require: The most that a run may reveal about one `unit` of its data: a server that promises
            less privacy, or none, is refused, and with local noise it is what the site's own ledger
            pays from.
        unit: What `require` is about: one of its records, or all of them.
        adjacency: What else they might be, as `require` means it.
        trust: The only trust model that it takes part in: who insists on "local" never sends a
            record. None for any.
        noise: Where the noise of its increments comes from.
        blobs: Where broadcasts lie.
    """

    name: AgentId
    space: SearchSpace
    seed: int = field(repr=False)
    decision_sets: DecisionSets | None = field(default=None, repr=False)
    candidates: Tensor | None = None
    require: Budget | None = None
    unit: Unit = "record"
    adjacency: Adjacency = "replace-one"
    trust: Trust | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    blobs: Blobs = field(default_factory=MemoryBlobs)

    state_type = PrivateUCBAgentState
    accepts = (Query,)
    defers = False

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit) or self.adjacency not in get_args(Adjacency):
            raise InputDataError(
                f"unit is one of {get_args(Unit)} and adjacency one of {get_args(Adjacency)}, got "
                f"{self.unit!r} and {self.adjacency!r}."
            )
        if self.trust is not None and self.trust not in get_args(Trust):
            raise InputDataError(f"trust is one of {get_args(Trust)}, got {self.trust!r}.")
        if self.candidates is not None:
            if self.decision_sets is not None:
                raise InputDataError(
                    "Give candidates, which are the same in all rounds, or decision_sets."
                )
            _check_arms(self.candidates, self.space.dim, "candidates")

    @property
    def fingerprint(self) -> str:
        """Hash of the settings that determine what it asks for."""
        settings = (
            self.name,
            self.space.fingerprint,
            self.seed,
            self.decision_sets is not None,
            tensor_hash(self.candidates),
            self.require,
            self.unit,
            self.adjacency,
            self.trust,
            self.noise.private,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    # -------------------------------------------------------------- four verbs

    def start(self) -> PrivateUCBAgentState:
        """The state before the first request."""
        return PrivateUCBAgentState(0, "rest", "", None, None, None, None, 0, None)

    def check(
        self, state: PrivateUCBAgentState, request: Query, broadcasts: tuple[str, ...]
    ) -> None:
        """Raise `MessageError` unless the request and what it broadcasts fit."""
        if len(broadcasts) not in (1, 2):
            raise MessageError(f"Expected a setup and a release, got {len(broadcasts)} broadcasts.")
        setup, phi = _setup(self.blobs, broadcasts[0])
        check_agreement(self.space, setup.space, phi)
        if state.setup not in ("", broadcasts[0]):
            raise MessageError("The setup has changed during the run.")
        if not state.t < request.t <= setup.horizon:
            raise MessageError(
                f"Rounds go on from {state.t} to {setup.horizon}, got round {request.t}."
            )
        self._check_action(setup, request)
        self._check_promise(setup)
        if len(broadcasts) == 2:
            parameters = _parameters(self.blobs, broadcasts[1], broadcasts[0])
            if not parameters.t < request.t:
                raise MessageError(
                    f"Round {request.t} acts on earlier rounds, got a release of round "
                    f"{parameters.t}."
                )

    def _check_action(self, setup: Setup, request: Query) -> None:
        X = request.X
        if (X is not None) != (setup.trust == "public"):
            raise MessageError("A query has an action if and only if actions are public.")
        if X is None:
            return
        if self.decision_sets is not None:
            raise MessageError("This site has decision sets of its own: its actions are private.")
        _check_point(X, self.space.dim, "An action")
        known = self.candidates
        if known is not None and not bool((known == X).all(dim=-1).any()):
            raise MessageError("The action is none of those that this site can play.")

    def _check_promise(self, setup: Setup) -> None:
        if self.trust not in (None, setup.trust):
            raise MessageError(
                f"This site takes part with trust={self.trust!r}, the server says {setup.trust!r}."
            )
        promise = setup.promise
        if promise is not None and (promise.unit, promise.adjacency) != (
            setup.unit,
            setup.adjacency,
        ):
            raise MessageError(
                f"The promise is per {promise.unit}, {promise.adjacency}, and the noise per "
                f"{setup.unit}, {setup.adjacency}: they must agree."
            )
        check_unit_promise(promise, self.require, self.unit, self.adjacency)
        if self.require is not None and setup.trust == "local" and not self.noise.private:
            raise MessageError("This site requires privacy, and its own noise comes from a seed.")

    def receive(
        self, state: PrivateUCBAgentState, request: Query, broadcasts: tuple[str, ...]
    ) -> PrivateUCBAgentState:
        """The state after a request; what it would cost is checked before anything is played."""
        setup, phi = _setup(self.blobs, broadcasts[0])
        ledger = state.ledger
        if setup.trust == "local":
            if ledger is None:
                ledger = Ledger(setup.adjacency, setup.unit, self.require)
            event = _local_mechanism(setup, phi.num_features).event
            _paying(setup, ledger, state.releases).spend(event, private=self.noise.private)
        return replace(
            state,
            t=request.t,
            step="query",
            setup=broadcasts[0],
            parameters=broadcasts[1] if len(broadcasts) > 1 else None,
            action=request.X,
            X=None,
            Y=None,
            ledger=ledger,
        )

    def wants(self, state: PrivateUCBAgentState) -> bool:
        """Whether the action of the round is still to be played."""
        return state.step == "query"

    def ask(
        self, state: PrivateUCBAgentState, pending: Tensor | None = None
    ) -> Tensor | Pending | None:
        """The action, `1 x d`, or None if it has been played or is being played."""
        if state.step == "rest" or (pending is not None and len(pending)):
            return None
        if state.action is not None:
            return state.action
        return _action(
            self._view(state), self.space, self._arms(state.t), seed=self.seed, t=state.t
        )

    def _view(self, state: PrivateUCBAgentState) -> _View | None:
        if state.parameters is None:
            return None
        try:
            return _view(self.blobs, state.parameters, state.setup)
        except NumericalError:
            logger.warning("agent %r cannot read the release for round %d", self.name, state.t)
            return None

    def _arms(self, t: int) -> Tensor | None:
        if self.decision_sets is None:
            return None if self.candidates is None else self.candidates.double()
        arms = self.decision_sets(t)
        _check_arms(arms, self.space.dim, f"The decision set of round {t}")
        return arms.double()

    def left(self, state: PrivateUCBAgentState, pending: int) -> int:
        """One action at a time."""
        return int(self.wants(state) and not pending)

    def tell(self, state: PrivateUCBAgentState, X: Tensor, Y: Tensor) -> PrivateUCBAgentState:
        """The state after an action; needs no broadcast, so that a late value can be told.

        An action that failed has the worst outcome there is, which is clipped to the public range.
        """
        Y = self.space.outcome.to_public(Y).nan_to_num(nan=-MAX_OUTCOME)
        return replace(state, step="rest", X=X, Y=Y)

    def attach(self, state: PrivateUCBAgentState, X: Tensor, Y: Tensor) -> PrivateUCBAgentState:
        """Refused: what an agent has not played in a round is in no release."""
        raise InputDataError(
            "A private bandit learns from what is played in its rounds: results that exist already "
            "cannot be attached."
        )

    def reply(
        self, state: PrivateUCBAgentState
    ) -> tuple[PrivateUCBAgentState, Record | Increment | Outcome]:
        """What the trust model says; the state keeps nothing of it but what it has cost."""
        X, Y = state.X, state.Y
        if X is None or Y is None:
            raise ProtocolError("Nothing was played in this round: there is nothing to reply.")
        setup, phi = _setup(self.blobs, state.setup)
        after = replace(state, action=None, X=None, Y=None)
        if setup.trust == "public":
            return after, Outcome(Y)
        if setup.trust != "local":
            return after, Record(X, Y)
        assert state.ledger is not None
        mechanism = _local_mechanism(setup, phi.num_features)
        release, ledger = mechanism.release(
            # A made-up basis must not tell by a missing reply where an agent's own arms are.
            mechanism.records(unit_features(phi, X).nan_to_num(0.0, 0.0, 0.0), Y),
            ledger=_paying(setup, state.ledger, state.releases),
            noise=self.noise,
            path=("increment", self.name, state.t),
        )
        after = replace(after, releases=state.releases + 1, ledger=ledger)
        return after, Increment(release.values[0])


def check_unit_promise(
    promise: Guarantee | None, require: Budget | None, unit: Unit, adjacency: Adjacency
) -> None:
    """Raise `MessageError` unless a server promises what a site requires for a record or for all.

    A promise for all of an agent's records holds for each of them, and one for any other record
    holds for one that counts for nothing; not the other way round.

    Args:
        promise: What the server says.
        require: What the site requires; None for nothing.
        unit: What the site requires it for.
        adjacency: What else that might be.
    """
    if require is None:
        return
    wanted = f"({require.epsilon:g}, {require.delta:g})-DP per {unit}"
    if promise is None:
        raise MessageError(f"This site requires {wanted}, the server promises none.")
    if not promise.private:
        raise MessageError(f"This site requires {wanted}, the server's noise comes from a seed.")
    if promise.unit != unit and unit == "agent":
        raise MessageError(f"This site requires {wanted}, the server promises it per record.")
    if promise.adjacency != adjacency and adjacency == "replace-one":
        raise MessageError(
            f"This site requires {wanted}, replace-one, the server promises zero-out."
        )
    if promise.epsilon > require.epsilon or promise.delta > require.delta:
        raise MessageError(
            f"This site requires {wanted}, the server promises "
            f"({promise.epsilon:.4g}, {promise.delta:.4g})."
        )


def _paying(setup: Setup, ledger: Ledger, releases: int) -> Ledger:
    """The ledger that pays for the next increment.

    A record is in one increment, at whose price all of them come (parallel composition); an agent
    is in all of them and pays for each.
    """
    return ledger if setup.unit == "agent" or not releases else replace(ledger, entries=())


def _local_mechanism(setup: Setup, num_features: int) -> LocalGaussian:
    return LocalGaussian(
        num_features=num_features,
        outcome_bound=setup.outcome_bound,
        moment_scale=setup.moment_scale,
        noise_multiplier=setup.noise_multiplier,
        adjacency=setup.adjacency,
        unit=setup.unit,
    )


@lru_cache(maxsize=16)
def _setup(blobs: Blobs, digest: str) -> tuple[Setup, FeatureMap]:
    """A setup and its feature map; public, and the same for all agents of a process."""
    setup: Setup = blobs.load(digest, Setup)
    phi = received_features(setup.features, setup.space)
    if not 0 < scale_of(phi) < math.inf:
        raise MessageError("The shared basis has no prior variance.")
    if not _fits(phi):
        raise MessageError(
            f"Sums over {phi.num_features} features are too large to be sent: use at most 2,000."
        )
    if setup.trust == "local":
        try:
            _local_mechanism(setup, phi.num_features)
        except InputDataError as error:
            raise MessageError(f"The setup asks for noise that there is not: {error}") from error
    return setup, phi


def _fits(phi: FeatureMap) -> bool:
    """Whether a sum over so many features can be sent, with room for what goes with it."""
    m = phi.num_features
    return 4 * m * (m + 3) <= MAX_BYTES - 2**16


@lru_cache(maxsize=16)
def _parameters(blobs: Blobs, digest: str, setup_digest: str) -> Parameters:
    """A release, checked; the same for all agents of a process."""
    parameters: Parameters = blobs.load(digest, Parameters)
    setup, phi = _setup(blobs, setup_digest)
    _check_numbers(parameters.values, setup.statistic_of(phi.num_features).dim, "A release")
    if not 0 <= parameters.noise_std <= MAX_NUMBER or min(parameters.t, parameters.count) < 0:
        raise MessageError("A release has a noise_std from 0 on, and counts from 0.")
    return parameters


@lru_cache(maxsize=16)
def _view(blobs: Blobs, digest: str, setup_digest: str) -> _View:
    """What a release says; worked out once for all agents of a process."""
    setup, phi = _setup(blobs, setup_digest)
    return _View.of(setup, phi, _parameters(blobs, digest, setup_digest))


def _check_arms(arms: Tensor, dim: int, what: str) -> None:
    check_points(arms, dim, what)
    if not len(arms):
        raise InputDataError(f"{what} must not be empty.")


def _check_point(X: Tensor, dim: int, what: str) -> None:
    if X.shape != (1, dim) or X.dtype != torch.float64:
        raise MessageError(
            f"{what} must be a float64 `1 x {dim}` tensor, got {X.dtype} of shape {tuple(X.shape)}."
        )
    if not bool(((X >= 0) & (X <= 1)).all()):  # false for NaN
        raise MessageError(f"{what} must lie in the unit cube.")


def _check_outcome(Y: Tensor) -> None:
    if Y.shape != (1, 1) or Y.dtype != torch.float64 or not bool(Y.isfinite().all()):
        raise MessageError(
            f"An outcome must be a finite float64 `1 x 1` tensor, got {Y.dtype} of shape "
            f"{tuple(Y.shape)}, or NaN or infinity."
        )


def _check_numbers(values: Tensor, dim: int, what: str, most: float = MAX_NUMBER) -> None:
    if values.shape != (dim,) or values.dtype != torch.float64:
        raise MessageError(
            f"{what} has {dim} float64 numbers, got {values.dtype} of shape {tuple(values.shape)}."
        )
    if not bool((values.abs() <= most).all()):  # false for NaN
        raise MessageError(f"{what} has a number beyond {most:.3g}, or one that is not finite.")


# ------------------------------------------------------------------ the server


@dataclass(frozen=True, eq=False)
class Block:
    """A public action that is being played.

    Attributes:
        X: The action, `1 x d`.
        length: How many outcomes it takes.
        count: How many of them there are.
    """

    X: Tensor
    length: int
    count: int


@dataclass(frozen=True, eq=False)
class BlockSecret:
    """What the server keeps of blocks after a round: the sum, and what was released in it."""

    state: BlockState
    release: BlockRelease | None

    def __repr__(self) -> str:
        return "BlockSecret(secret)"


@dataclass(frozen=True, eq=False)
class PrivateUCBServerState:
    """What the server keeps; nothing in it is secret.

    Attributes:
        t: Finished rounds.
        asked: How many queries were made in them.
        stream: A random name of this start of the run, under which its secrets lie.
        parameters: The newest release.
        block: The public action that is being played.
        ledger: What this run has paid.
    """

    t: int
    asked: int
    stream: str
    parameters: Parameters | None
    block: Block | None
    ledger: Ledger


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateUCBServer:
    """The server of private GP-UCB, with "joint" and "public" the trusted privatizer.

    The whole run is paid for at the start of the first round, books first. The state of a mechanism
    is kept in `secrets` before its release is used, under a name that has the round, and is used as
    it is if it is there: no crash makes it draw noise twice. The last two are kept. The books may
    count a run twice, and never too little, if a crash comes between them and the first secret.

    Args:
        setup: What all agents agree upon, without its promise: the server makes it.
        agents: Names of all agents, the public roster.
        batch: How many of them are asked in a round, in turn.
        mechanism: A `PrefixSum` for "joint", `LocalGaussian` for "local", `BlockSum` for "public".
        delta: Of the promise.
        candidates: For "public": what may be played, `K x d`; default the whole unit cube.
        most_per_block: For "public": the longest block; default a twentieth of all outcomes.
        seed: For "public": of the choices, not secret.
        final_release: Whether the last round is released, which no round acts on.
        ledger: What was paid before, and the budget of this run.
        books: A durable ledger, which pays as well: it may span several runs.
        noise: Where noise comes from; for "local", whether the agents' is secret.
        secrets: Where sums without noise lie. With a run that is to outlive a crash a `FileStore`.
    """

    setup: Setup
    agents: tuple[AgentId, ...]
    batch: int
    mechanism: Mechanism | None
    delta: float = 1e-5
    candidates: Tensor | None = None
    most_per_block: int | None = None
    seed: int = 0
    final_release: bool = True
    ledger: Ledger = Ledger(adjacency="replace-one", unit="record")  # noqa: RUF009 - frozen
    books: LedgerFile | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    secrets: Store = field(default_factory=MemoryStore, repr=False)
    _newest: dict[str, Any] = field(default_factory=dict, repr=False)

    state_type = PrivateUCBServerState

    def __post_init__(self) -> None:
        if len(set(self.agents)) < len(self.agents) or not self.agents:
            raise InputDataError("There must be at least one agent, and names must differ.")
        if isinstance(self.batch, bool) or not 1 <= self.batch <= len(self.agents):
            raise InputDataError(
                f"batch must lie in 1..{len(self.agents)}, the number of agents, got {self.batch}."
            )
        if not _fits(self._phi):
            raise InputDataError(
                f"Sums over {self._phi.num_features} features are larger than messages may be: use "
                "at most 2,000. Noise grows with them too: under privacy 6 to 30 are plenty."
            )
        if self.setup.promise is not None:
            raise InputDataError("The server makes the promise: leave it out of the setup.")
        if self.candidates is not None:
            if self.trust != "public":
                raise InputDataError("The server has candidates for public actions only.")
            _check_arms(self.candidates, self.setup.space.dim, "candidates")
        if self.most_per_block is not None and self.most_per_block < 1:
            raise InputDataError(f"most_per_block counts from 1, got {self.most_per_block}.")
        self._check_mechanism()
        self._check_ledger()

    def _check_mechanism(self) -> None:
        kinds = {"joint": PrefixSum, "local": LocalGaussian, "public": BlockSum, "none": type(None)}
        kind = kinds[self.trust]
        mechanism, setup = self.mechanism, self.setup
        if not isinstance(mechanism, kind):
            raise InputDataError(
                f"trust={self.trust!r} needs a {kind.__name__}, got a {type(mechanism).__name__}."
            )
        if mechanism is None:
            return
        theirs: tuple[Any, ...] = (
            mechanism.noise_multiplier,
            mechanism.outcome_bound,
            mechanism.adjacency,
            mechanism.unit,
            mechanism.centre,
        )
        mine: tuple[Any, ...] = (
            setup.noise_multiplier,
            setup.outcome_bound,
            setup.adjacency,
            setup.unit,
            0.0,
        )
        if not isinstance(mechanism, BlockSum):
            theirs += (mechanism.num_features, mechanism.moment_scale)
            mine += (self._phi.num_features, setup.moment_scale)
        if theirs != mine:
            raise InputDataError(
                "The mechanism is not that of the setup: noise multiplier, bound, adjacency, unit, "
                "centre 0, number of features and scale of the moment must agree."
            )
        if isinstance(mechanism, PrefixSum):
            if mechanism.horizon < self.releases:
                raise InputDataError(
                    f"{self.releases} sums are released, the mechanism has a horizon of "
                    f"{mechanism.horizon}: give it a longer one."
                )
            least = self.participations if setup.unit == "agent" else 1
            if mechanism.participations < least:
                raise InputDataError(
                    f"An agent is asked up to {least} times, the mechanism is for "
                    f"{mechanism.participations} participations: give it more."
                )
        if isinstance(mechanism, BlockSum) and setup.unit == "agent" and self.participations > 1:
            raise InputDataError(
                f"An agent is asked up to {self.participations} times: blocks of outcomes protect "
                'agents that give one. Use unit="record", or as many agents as queries.'
            )

    def _check_ledger(self) -> None:
        if not isinstance(self.mechanism, PrefixSum | BlockSum):
            if self.books is not None or self.ledger.budget is not None:
                raise InputDataError(
                    f"With trust={self.trust!r} the server pays for nothing: leave out its books "
                    "and its budget."
                )
            return
        mine = self.setup.adjacency, self.setup.unit
        for ledger in (self.ledger, self.books):
            if ledger is not None and (ledger.adjacency, ledger.unit) != mine:
                raise InputDataError(
                    "The ledger or the books are for another adjacency or unit than the setup's "
                    f"{mine[0]!r} and {mine[1]!r}."
                )
        self.ledger.spend(self.mechanism.event)  # a budget that does not cover it is refused now
        if self.books is not None:
            # A resumed run has paid from them already.
            with contextlib.suppress(BudgetExceeded):
                self.books.ledger.spend(self.mechanism.event)  # a value: nothing is written

    def __repr__(self) -> str:
        promise = "no privacy" if self.promise is None else str(self.promise)
        return (
            f"PrivateUCBServer(agents={len(self.agents)}, rounds={self.rounds}, "
            f"batch={self.batch}, trust={self.trust}, {promise})"
        )

    @property
    def trust(self) -> Trust:
        """Who adds noise."""
        return self.setup.trust

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return self.setup.horizon

    @property
    def accepts(self) -> tuple[type, ...]:
        """The one message that the trust model knows."""
        return ({"local": Increment, "public": Outcome}.get(self.trust, Record),)

    @property
    def releases(self) -> int:
        """How many sums are released, if all rounds are."""
        return self.rounds - (not self.final_release)

    @property
    def participations(self) -> int:
        """How often an agent is asked at most."""
        return most_participations(self.rounds, self.batch, len(self.agents))

    @property
    def fingerprint(self) -> str:
        """Hash of its settings."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        mechanism = self.mechanism
        settings = (
            content_hash(encode(self._promised_setup)),
            self.agents,
            self.batch,
            repr(mechanism),
            mechanism.noise_scale if isinstance(mechanism, PrefixSum) else None,
            tensor_hash(self.candidates),
            self.most_per_block,
            self.seed,
            self.final_release,
            self.noise.private,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @cached_property
    def _phi(self) -> FeatureMap:
        return feature_map_from_tensors(self.setup.features)

    @cached_property
    def _statistic(self) -> RecordStatistic:
        return self.setup.statistic_of(self._phi.num_features)

    # -------------------------------------------------------------- what it costs

    def _events(self, participations: int) -> list[Event]:
        """What a unit pays that takes part so often."""
        assert self.mechanism is not None
        each = self.trust == "local" and self.setup.unit == "agent"
        return [self.mechanism.event] * (participations if each else min(participations, 1))

    def _guarantee(self, participations: int) -> Guarantee:
        composed = compose(
            self._events(participations),
            delta=self.delta,
            adjacency=self.setup.adjacency,
            unit=self.setup.unit,
        )
        return replace(composed, private=self.noise.private)

    @cached_property
    def promise(self) -> Guarantee | None:
        """What the whole run reveals about one unit at most; None without noise."""
        return None if self.mechanism is None else self._guarantee(self.participations)

    @cached_property
    def _promised_setup(self) -> Setup:
        return replace(self.setup, promise=self.promise)

    def privacy(self, state: PrivateUCBServerState) -> dict[str, Any]:
        """What a report needs: the promise, what was paid, and the signal beside the noise."""
        sums = 0 if state.parameters is None else state.parameters.count
        common = {"trust": self.trust, "outcomes": sums}
        if self.price is None:
            return {"mechanism": "none", "private": False, **common}
        return {
            **self.price.account(self.paid(state)),
            "signal_to_noise": signal_to_noise(state.parameters),
            **common,
        }

    def paid(self, state: PrivateUCBServerState) -> tuple[Entry, ...]:
        """All payments so far of the unit that has paid most."""
        if self.mechanism is None or self.trust != "local":
            return state.ledger.entries
        events = self._events(most_participations(1, state.asked, len(self.agents)))
        return (Entry(events[0], len(events), "increments"),) if events else ()

    @cached_property
    def price(self) -> Price | None:
        """What a run costs in privacy; None without noise."""
        mechanism = self.mechanism
        if mechanism is None or self.promise is None:
            return None
        releases = self.releases
        if isinstance(mechanism, PrefixSum):
            noise_std = mechanism.noise_std(releases)
        elif isinstance(mechanism, LocalGaussian):
            noise_std, releases = mechanism.noise_scale, self.rounds * self.batch
        else:
            noise_std = mechanism.noise_std
        return Price(
            guarantee=self.promise,
            event=mechanism.event,
            payments=len(self._events(self.participations)),
            releases=releases,
            mechanism=type(mechanism).__name__,
            settings=repr(mechanism),
            noise_std=noise_std,
            trust=self.sees.trust,
            paid_at="site" if self.trust == "local" else "hub",
        )

    @cached_property
    def sees(self) -> Sees:
        """Who sees what."""
        D = self._statistic.dim
        public, none = self.trust == "public", self.trust == "none"
        query = Row.of(Query, "server", "the number of the round", ADDRESSEE)
        if public:
            action = "the round and the action to play, a function of earlier releases"
            query = Row.of(Query, "server", action, EVERYBODY, "noisy data")
        sent = {
            "joint": (Record, "every record, an action and its outcome", "data"),
            "local": (Increment, f"the statistics of a record with noise, {D} numbers", None),
            "public": (Outcome, "the outcome of every public action", "data"),
            "none": (Record, "every record, an action and its outcome", "data"),
        }
        kind, content, reveals = sent[self.trust]
        of = "the outcomes of a block" if public else "the statistics of all records"
        released = f"the {'' if none else 'noisy '}sum of {of}, {D} numbers"
        if self.trust == "local":
            released = f"the sum of all noisy statistics, {D} numbers"
        trusted = {
            "joint": "The server is trusted with every record and adds the noise; the guarantee "
            "is against all others together, not against the server.",
            "local": "No party is trusted: the guarantee is against the server as well.",
            "public": "The server is trusted with every outcome and adds the noise; the guarantee "
            "is for outcomes alone, against all others together, because actions are public.",
            "none": "The server is trusted with every record and all agents with sums of them.",
        }
        return Sees(
            rows=(
                Row.of(
                    Setup,
                    "server",
                    "search space, shared basis, rules of action and the promise",
                    EVERYBODY,
                ),
                query,
                Row.of(
                    kind,
                    "agent",
                    content,
                    ("server",),
                    "noisy data" if reveals is None else "data",
                ),
                Row.of(
                    Parameters,
                    "server",
                    f"{released}, from which all make the same posterior",
                    EVERYBODY,
                    "data" if none else "noisy data",
                ),
            ),
            trust=trusted[self.trust],
            stays="An agent's own data, actions and outcomes stay with the agent."
            if self.trust == "local"
            else "",
        )

    def model(self, state: PrivateUCBServerState) -> BasisGP:
        """The posterior of the newest release, which anybody may have."""
        return parameters_model(self.setup, state.parameters)

    # -------------------------------------------------------------- the rounds

    def start(self) -> PrivateUCBServerState:
        """The state before the first round."""
        state = PrivateUCBServerState(0, 0, token_hex(8), None, None, self.ledger)
        return self._with_block(state)

    def outbox(self, state: PrivateUCBServerState) -> Outbox | None:
        """One action each from the agents whose turn it is."""
        if state.t >= self.rounds:
            return None
        self._check_secret(state)
        query = Query(state.t + 1, None if state.block is None else state.block.X)
        broadcasts: tuple[Any, ...] = (self._promised_setup,)
        if state.parameters is not None:
            broadcasts += (state.parameters,)
        return Outbox(dict.fromkeys(self._asked(state), query), broadcasts)

    def _asked(self, state: PrivateUCBServerState) -> tuple[AgentId, ...]:
        """Whose turn it is; never more than an open block has room for."""
        count, N = self._num_asked(state), len(self.agents)
        return tuple(self.agents[(state.asked + i) % N] for i in range(count))

    def _num_asked(self, state: PrivateUCBServerState) -> int:
        if state.block is None:
            return self.batch
        return min(self.batch, state.block.length - state.block.count)

    @cached_property
    def _places(self) -> dict[AgentId, int]:
        return {agent: place for place, agent in enumerate(self.agents)}

    def check(
        self, state: PrivateUCBServerState, sender: AgentId, message: Record | Increment | Outcome
    ) -> None:
        """Raise `MessageError` unless a reply fits the trust model and can be added."""
        if not isinstance(message, self.accepts):
            raise MessageError(
                f"Expected {self.accepts[0].__name__}, got {type(message).__name__}."
            )
        place, N = self._places.get(sender, -1), len(self.agents)
        if place < 0 or (place - state.asked) % N >= self._num_asked(state):
            raise MessageError("A reply that nobody asked for.")
        if isinstance(message, Increment):
            assert isinstance(self.mechanism, LocalGaussian)
            most = self._statistic.largest + 1 + MAX_NOISE * self.mechanism.noise_scale
            _check_numbers(message.values, self._statistic.dim, "An increment", most)
            return
        if isinstance(message, Record):
            _check_point(message.X, self.setup.space.dim, "An action")
        _check_outcome(message.Y)

    def step(
        self,
        state: PrivateUCBServerState,
        inbox: Mapping[AgentId, Record | Increment | Outcome],
    ) -> PrivateUCBServerState:
        """Add what has come and release the sum; an absent agent adds nothing.

        Raises:
            BudgetExceeded: Of the first round: the books do not cover the run. Nothing is released.
            ProtocolError: The secret of the last round is missing.
        """
        asked = self._asked(state)
        given = [inbox[agent] for agent in asked if agent in inbox]
        after = replace(state, t=state.t + 1, asked=state.asked + len(asked))
        if state.t >= self.releases:
            return after
        if self.trust == "public":
            return self._block_step(state, after, [m for m in given if isinstance(m, Outcome)])
        if self.trust == "local":
            return self._local_step(after, [m for m in given if isinstance(m, Increment)])
        records = self._records([m for m in given if isinstance(m, Record)])
        if self.trust == "none":
            return self._plain_step(after, records)
        return self._joint_step(state, after, records)

    def _records(self, given: list[Record]) -> Tensor:
        """Records as mechanisms take them, `n x (m + 1)`."""
        if not given:
            return torch.zeros(0, self._phi.num_features + 1, dtype=torch.float64)
        X = torch.cat([record.X for record in given])
        Y = torch.cat([record.Y for record in given])
        return self._statistic.records(unit_features(self._phi, X), Y)

    def _joint_step(
        self, state: PrivateUCBServerState, after: PrivateUCBServerState, records: Tensor
    ) -> PrivateUCBServerState:
        mechanism = self.mechanism
        assert isinstance(mechanism, PrefixSum)
        ledger = self._paid(state)

        def make() -> PrefixState:
            if state.t == 0:
                self._pay_books()
                before, _ = mechanism.start(ledger=state.ledger, noise=self.noise)
            else:
                before = self._secret(state, PrefixState)
            return mechanism.step(before, records, noise=self.noise, path=("release",))[0]

        secret = self._kept(state, PrefixState, make)
        release = mechanism.release(secret)
        return replace(
            after,
            ledger=ledger,
            parameters=_released(after.t, release.values, release.noise_std, secret.records),
        )

    def _local_step(
        self, after: PrivateUCBServerState, given: list[Increment]
    ) -> PrivateUCBServerState:
        mechanism = self.mechanism
        assert isinstance(mechanism, LocalGaussian)
        values, count = self._so_far(after)
        for increment in given:
            values = values + increment.values
        count += len(given)
        if not count:
            return after
        noise_std = mechanism.noise_std(count)
        return replace(after, parameters=_released(after.t, values, noise_std, count))

    def _plain_step(self, after: PrivateUCBServerState, records: Tensor) -> PrivateUCBServerState:
        values, count = self._so_far(after)
        values, count = (
            values + self._statistic.statistics(records).sum(dim=0),
            count + len(records),
        )
        return replace(after, parameters=_released(after.t, values, 0.0, count))

    def _block_step(
        self, state: PrivateUCBServerState, after: PrivateUCBServerState, given: list[Outcome]
    ) -> PrivateUCBServerState:
        mechanism, block = self.mechanism, state.block
        assert isinstance(mechanism, BlockSum)
        assert block is not None
        ledger = self._paid(state)

        def make() -> BlockSecret:
            if state.t == 0:
                self._pay_books()
                before, _ = mechanism.start(ledger=state.ledger, noise=self.noise)
            else:
                before = self._secret(state, BlockSecret).state
            if not before.length:
                before = mechanism.open(before, block.length)
            if not given:
                return BlockSecret(before, None)
            outcomes = torch.cat([outcome.Y for outcome in given])
            return BlockSecret(
                *mechanism.add(before, outcomes, noise=self.noise, path=("release",))
            )

        secret = self._kept(state, BlockSecret, make)
        after = replace(after, ledger=ledger)
        if secret.release is None:
            return replace(after, block=replace(block, count=secret.state.count))
        values, count = self._so_far(after)
        parameters = _released(
            after.t, values + self._of_block(block.X, secret.release), 0.0, count + block.length
        )
        return self._with_block(replace(after, parameters=parameters, block=None))

    def _of_block(self, X: Tensor, release: BlockRelease) -> Tensor:
        """A block's mean as one record, with the weight of its variance: `D` numbers."""
        noise_var = self.setup.noise_var
        mean = torch.tensor([[release.mean]], dtype=torch.float64)
        weight = noise_var / release.mean_var(noise_var)
        return weight * self._statistic.products(unit_features(self._phi, X), mean)[0]

    def _with_block(self, state: PrivateUCBServerState) -> PrivateUCBServerState:
        """With the next public action, if actions are public and there are rounds left."""
        left = (self.rounds - state.t) * self.batch
        if not isinstance(self.mechanism, BlockSum) or not left:
            return state
        view, known = None, math.sqrt(scale_of(self._phi))
        if state.parameters is not None:
            view = _View.of(self.setup, self._phi, state.parameters)
        arms = None if self.candidates is None else self.candidates.double()
        X = _action(view, self.setup.space, arms, seed=self.seed, t=state.t + 1)
        if view is not None:
            with torch.no_grad():
                known = float(view.predict(X)[1])
        most = self.most_per_block
        if most is None:
            most = max(1, self.rounds * self.batch // SHARE)
        most = min(most, max(1, self.releases - state.t) * self.batch)  # what can be released
        length = self.mechanism.length(known, math.sqrt(self.setup.noise_var), most=most)
        return replace(state, block=Block(X, length, 0))

    def _so_far(self, state: PrivateUCBServerState) -> tuple[Tensor, int]:
        """The newest sum, and how many outcomes it is made of."""
        if state.parameters is None:
            return torch.zeros(self._statistic.dim, dtype=torch.float64), 0
        return state.parameters.values, state.parameters.count

    # -------------------------------------------------------------- what is paid and kept

    def _paid(self, state: PrivateUCBServerState) -> Ledger:
        """The ledger of the run, which pays once, in the first round."""
        if state.t > 0:
            return state.ledger
        assert self.mechanism is not None
        note = type(self.mechanism).__name__
        return state.ledger.spend(self.mechanism.event, note=note, private=self.noise.private)

    def _pay_books(self) -> None:
        if self.books is not None:
            assert self.mechanism is not None
            self.books.spend(
                self.mechanism.event, note="private GP-UCB", private=self.noise.private
            )

    def _name(self, state: PrivateUCBServerState, t: int) -> str:
        return f"private-ucb-{self.fingerprint[:16]}-{state.stream}-{t}"

    def _kept(
        self,
        state: PrivateUCBServerState,
        kind: type[_Secret],
        make: Callable[[], _Secret],
    ) -> _Secret:
        """The secret after the round: what a crash has left, or a new one, kept before its use."""
        name = self._name(state, state.t + 1)
        data = self.secrets.get(name)
        if data is None:
            secret = make()
            self.secrets.put_new(name, encode(secret, max_bytes=STATE_BYTES))
        else:
            secret = _read(data, kind)
        if state.t > 0:
            self.secrets.delete(self._name(state, state.t - 1))
        self._newest.clear()
        self._newest[name] = secret
        return secret

    def _secret(self, state: PrivateUCBServerState, kind: type[_Secret]) -> _Secret:
        """The secret of the last round."""
        name = self._name(state, state.t)
        known = self._newest.get(name)
        if isinstance(known, kind):
            return known
        data = self.secrets.get(name)
        if data is None:
            raise _missing(state)
        return _read(data, kind)

    def _check_secret(self, state: PrivateUCBServerState) -> None:
        """Raise before agents are asked in vain."""
        if not isinstance(self.mechanism, PrefixSum | BlockSum) or state.t == 0:
            return
        name = self._name(state, state.t)
        if name not in self._newest and self.secrets.get(name) is None:
            raise _missing(state)


def most_participations(rounds: int, batch: int, num_agents: int) -> int:
    """How often one agent is asked at most, if they are asked in turn."""
    return -(-rounds * batch // num_agents)


def signal_to_noise(parameters: Parameters | None) -> float | None:
    r"""An estimate of :math:`\|signal\|/\|noise\|` in a release; None where nothing says it."""
    if parameters is None or parameters.noise_std == 0:
        return None
    noise = parameters.noise_std**2 * len(parameters.values)
    return math.sqrt(max(float(parameters.values.square().sum()) - noise, 0.0) / noise)


def _released(t: int, values: Tensor, noise_std: float, count: int) -> Parameters:
    """What agents see; they refuse what is larger."""
    return Parameters(t, values.clamp(-MAX_NUMBER, MAX_NUMBER), noise_std, count)


def _read(data: bytes, kind: type[_Secret]) -> _Secret:
    try:
        secret: _Secret = decode(data, kind, max_bytes=STATE_BYTES)
    except MessageError as error:
        raise ProtocolError(f"A secret of the server cannot be read: {error}") from error
    return secret


def _missing(state: PrivateUCBServerState) -> ProtocolError:
    return ProtocolError(
        f"The sums of round {state.t} are not among the server's secrets, so that nothing more can "
        "be released: resume with the store that the run was started with, and start a run that is "
        "to be resumed with out=folder, or with secrets=FileStore(folder)."
    )


# ------------------------------------------------------------------ a federation for `run`


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateUCB(Budgeted):
    r"""Private GP-UCB as a study: the settings of all agents and of the server.

    Args:
        budget: How many evaluations an agent makes at most. The number of rounds is
            ``T = floor(budget * agents / batch)``, which is `budget` where all are asked in every
            round. They are asked in turn: if `batch` does not divide ``budget * agents``, some
            agents make one evaluation less.
        epsilon: What the whole run may reveal about one unit; the noise follows from it.
        noise_multiplier: Instead of `epsilon`, the noise itself.
        delta: Beside `epsilon`. The paper's 0.1 is no :math:`\delta`.
        trust: Who adds noise, see the module; ``"none"`` has neither epsilon nor a multiplier.
        batch: How many agents are asked in a round; default all.
        feature_map: The shared basis; default `default_private_features`. Features cost noise: 6 to
            15 for epsilons up to one, 15 to 30 for ten.
        noise_var: Variance of an outcome on the public scale.
        outcome_bound: Outcomes on the public scale are clipped to this range around zero.
        moment_scale: See `RecordStatistic`.
        exploration: See `Setup`; with public actions 1.5 is better, because blocks are few.
        acquisition: See `Setup`.
        psd: See `Setup`.
        height: See `Setup`.
        inflate: See `Setup`; of use with ``trust="local"``, where noise is large.
        norm_bound: See `Setup`.
        factorization: Of the running sums, see `privacy.tree`.
        adjacency: What a neighbouring world is.
        unit: Whose data are protected: a record, or all of an agent's.
        require: The most that agents let a run reveal about one unit of theirs.
        books: A durable ledger that pays as well, e.g. for pilot runs too.
        noise: Where noise comes from. The default is the operating system, so a private run cannot
            be repeated; `InsecureSeededNoise(seed)` can, and protects nothing.
        secrets: Where the server keeps sums without noise; default in memory, and with
            ``run(out=…)`` in the server's part of the folder.
        decision_sets: What an agent may play in a round, by name and round (from 1 on): `K x d`.
        candidates: The only points that can be played, `K x d`; with public actions, public.
        most_per_block: For public actions, the longest block; default a twentieth of all outcomes.
        seed: For public actions, of the server's choices; not secret.
        final_release: Whether the last round is released too; without it noise is a bit smaller.

    Example:
        >>> problem = KernelBandit(num_agents=4, seed=0)
        >>> arms = lambda name, t: problem.decision_set(int(name[5:]), t)
        >>> result = run(PrivateUCB(budget=64, epsilon=10, decision_sets=arms), problem, seed=0)
        >>> result.privacy["epsilon"] <= 10
        True
    """

    budget: int
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    trust: Trust = "joint"
    batch: int | None = None
    feature_map: FeatureMap | None = None
    noise_var: float = 0.05
    outcome_bound: float = 2.0
    moment_scale: float | None = None
    exploration: float = 0.5
    acquisition: AcquisitionName = "ucb"
    psd: PSD = "floor"
    height: float = 4.0
    inflate: bool = False
    norm_bound: float = 0.0
    factorization: Factorization = "sqrt"
    adjacency: Adjacency = "replace-one"
    unit: Unit = "record"
    require: Budget | None = None
    books: LedgerFile | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    secrets: Store | None = field(default=None, repr=False)
    decision_sets: Callable[[AgentId, int], Tensor] | None = field(default=None, repr=False)
    candidates: Tensor | None = None
    most_per_block: int | None = None
    seed: int = 0
    final_release: bool = True
    _stores: Callable[[AgentId | None], Store] | None = field(default=None, repr=False)

    measure: ClassVar[Literal["cumulative"]] = "cumulative"

    def __post_init__(self) -> None:
        self._check_budget()
        given = (self.epsilon is not None) + (self.noise_multiplier is not None)
        if given != (self.trust != "none"):
            raise InputDataError(
                "A private run needs epsilon or noise_multiplier, one of the two. One without "
                'privacy is trust="none" and neither.'
            )
        if self.decision_sets is not None and self.trust == "public":
            raise InputDataError(
                'With trust="public" the decision set is fixed and public: give candidates, or '
                "nothing for the whole cube."
            )

    def rounds_for(self, names: tuple[AgentId, ...]) -> int:
        """As many rounds of `batch` agents as ask nobody more than `budget` times."""
        if self.batch is None:
            return self.budget
        batch = max(1, min(self.batch, len(names)))  # the server refuses others
        return self.budget * len(names) // batch

    def evaluated(self, names: tuple[AgentId, ...], state: PrivateUCBServerState) -> int:
        """How often an agent has been asked, in turn with the others."""
        return most_participations(1, state.asked, len(names))

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int | str:
        if self.batch is None:
            return rounds
        if not names:
            return f"{rounds * self.batch} / the number of agents, rounded up"
        return most_participations(rounds, self.batch, len(names))

    def evaluations_for(self, names: tuple[AgentId, ...]) -> int:
        """One evaluation of each agent that is asked in a round."""
        return self.rounds_for(names) * (len(names) if self.batch is None else self.batch)

    def __getstate__(self) -> dict[str, Any]:
        books = None if self.books is None else LedgerElsewhere()
        return {**self.__dict__, "books": books, "secrets": None, "_stores": None}

    def with_stores(
        self, names: tuple[AgentId, ...], stores: Callable[[AgentId | None], Store]
    ) -> Self:
        """The study with its secrets in stores: of the server's part, asked for by None, alone."""
        return replace(self, _stores=stores)

    def provision(self, space: SearchSpace) -> None:
        """Nothing has to be there before a run."""

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> PrivateUCBServer:
        """The server of a study."""
        phi = default_private_features(space) if self.feature_map is None else self.feature_map
        if phi.input_dim != space.dim:
            raise InputDataError(
                f"The feature map has {phi.input_dim} inputs, the search space {space.dim} columns."
            )
        batch = len(names) if self.batch is None else self.batch
        rounds = self.rounds_for(names)
        participations = most_participations(rounds, batch, len(names))
        z = self._noise_for(participations)
        setup = Setup(
            space=space,
            features=phi.to_tensors(),
            trust=self.trust,
            noise_var=self.noise_var,
            outcome_bound=self.outcome_bound,
            moment_scale=self._statistic(phi).moment_scale,
            noise_multiplier=z,
            adjacency=self.adjacency,
            unit=self.unit,
            horizon=rounds,
            exploration=self.exploration,
            acquisition=self.acquisition,
            psd=self.psd,
            height=self.height,
            inflate=self.inflate,
            norm_bound=self.norm_bound,
            promise=None,
        )
        budget = None
        if self.epsilon is not None and self.trust in ("joint", "public"):
            budget = Budget(self.epsilon, self.delta)
        return PrivateUCBServer(
            setup=setup,
            agents=names,
            batch=batch,
            mechanism=self._mechanism(setup, phi, participations),
            delta=self.delta,
            candidates=self.candidates if self.trust == "public" else None,
            most_per_block=self.most_per_block,
            seed=self.seed,
            final_release=self.final_release,
            ledger=Ledger(self.adjacency, self.unit, budget),
            books=self.books,
            noise=self.noise,
            secrets=self._secrets(),
        )

    def _secrets(self) -> Store:
        if self.secrets is not None:
            return self.secrets
        return MemoryStore() if self._stores is None else self._stores(None)

    def _statistic(self, phi: FeatureMap) -> RecordStatistic:
        common: dict[str, Any] = {}
        if self.moment_scale is not None:
            common["moment_scale"] = self.moment_scale
        return RecordStatistic(
            num_features=phi.num_features, outcome_bound=self.outcome_bound, **common
        )

    def _noise_for(self, participations: int) -> float:
        if self.epsilon is None:
            return 0.0 if self.noise_multiplier is None else float(self.noise_multiplier)
        each = self.trust == "local" and self.unit == "agent"
        return noise_multiplier_for(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling_rate=1.0,
            num_releases=participations if each else 1,
            adjacency=self.adjacency,
        )

    def _mechanism(self, setup: Setup, phi: FeatureMap, participations: int) -> Mechanism | None:
        if self.trust == "none":
            return None
        if self.trust == "local":
            return _local_mechanism(setup, phi.num_features)
        if self.trust == "public":
            return BlockSum(
                outcome_bound=setup.outcome_bound,
                noise_multiplier=setup.noise_multiplier,
                adjacency=setup.adjacency,
                unit=setup.unit,
            )
        return PrefixSum(
            num_features=phi.num_features,
            outcome_bound=setup.outcome_bound,
            moment_scale=setup.moment_scale,
            horizon=max(1, setup.horizon - (not self.final_release)),
            noise_multiplier=setup.noise_multiplier,
            factorization=self.factorization,
            adjacency=setup.adjacency,
            unit=setup.unit,
            participations=participations if setup.unit == "agent" else 1,
        )

    def alone(self) -> FTS:
        """The baseline of comparisons: agents with models of their own, without messages."""
        alone = FTS(budget=self.budget, every=0, strategy=TransferSearch(listen=False))
        return replace(alone, candidates=self.candidates)

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        return self.server(space, names).sees

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; None without noise."""
        return self.server(space, names).price

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> PrivateUCBAgent:
        """An agent of a study."""
        sets = None if self.decision_sets is None else partial(self.decision_sets, name)
        return PrivateUCBAgent(
            name=name,
            space=space,
            seed=seed,
            decision_sets=sets,
            candidates=self.candidates,
            require=self.require,
            unit=self.unit,
            adjacency=self.adjacency,
            trust=self.trust,
            noise=self.noise,
            blobs=blobs,
        )
