r"""Differentially private federated Thompson sampling with distributed exploration [Dai2021]_.

    message    from -> to       content                                        readable by
    Setup      server -> agent  search space, shared basis, regions, promise   all
    Query      server -> agent  start, query or share; whether to upload       that agent
    Upload     agent -> server  one weight vector, M numbers                   server
    Released   server -> agent  one noisy weight vector per region, P x M      all agents

Round 0 lets every agent explore its own region; rounds 1 to `T` are one query of every active agent
each. After a round of `releases` the server samples agents, clips their vectors, weighs them per
region, adds noise and releases `P` vectors, which every agent reads as a function that is
reconstructed region by region. Round `t` uses what was released after round `t - 1`, so that
nothing is released after round `T`.

Guarantee: for public rosters, regions, weights, features, clip norm, sampling rate, noise
multiplier and rounds, everything that any coalition of *other* agents sees in the whole run is
:math:`(\epsilon, \delta)`-indistinguishable from a run in which all of an agent's messages are zero
(`privacy.mechanisms` has the proof, `DPFTSDEServer.promise` the numbers). Agents that contribute
but never listen are covered as well.

Trust: the server is trusted with every message. Not covered: who sees an agent's own queries and
results; settings that were tuned on the agents' data without paying for it (a `LedgerFile` can span
the pilot runs); agents that learn who was sampled in a round.

Differs from the paper. By default:

- a message is the mean of the agent's own posterior, on its own standardised scale, as a function
  on the shared basis, scaled to the clip norm, so that nothing is lost by clipping
  (`noisy_prior`). A posterior sample is mostly prior randomness;
- one region; few and early releases, everyone takes part in each;
- agents average what they have heard and take it, as loud as it is reliable, as the prior of their
  own model, with a trust that own outcomes earn (`TransferSearch`). Releases that are mostly noise
  are ignored, and where that is to be expected beforehand (`Outlook`), nothing is released or
  spent: every agent goes on alone;
- all agents begin with points dealt from one sequence;
- a round without any sampled agent releases noise like every other one. The paper's code releases
  uniform numbers, which says that nobody was sampled;
- noise is correlated between regions, :math:`\sqrt P` less of it at the same privacy;
- without privacy the weighted means may be trimmed (`trim`), against messages that are not honest.

With ``strategy=Following()`` agents follow releases greedily in their first queries, the optima of
a sum of their *expected improvements*, and are alone afterwards.

`paper_settings` are the paper's.

.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021. https://arxiv.org/abs/2110.14153
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import torch
from botorch.exceptions.errors import InputDataError
from botorch.models import SingleTaskGP
from torch import Tensor

from botorch_fed.acquisition import (
    ExplorationSchedule,
    Partition,
    Polynomial,
    SoftmaxSchedule,
    ThompsonSampling,
    exploration_weights,
    weight_path,
)
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.errors import BudgetExceeded, MessageError, NumericalError, ProtocolError
from botorch_fed.federation.disclosure import ADDRESSEE, EVERYBODY, Price, Row, Sees
from botorch_fed.models import (
    FeatureMap,
    KLFeatures,
    OwnHyperparameters,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
    feature_map_from_tensors,
)
from botorch_fed.models.numerics import cholesky
from botorch_fed.privacy import (
    Budget,
    CorrelatedGaussianSum,
    Entry,
    Event,
    FixedSizeSampling,
    GaussianMechanism,
    Guarantee,
    Ledger,
    LedgerFile,
    NoiseSource,
    OSNoise,
    PoissonSampling,
    Release,
    SignalWarning,
    WeightedGaussianSum,
    clip,
    compose,
    noise_multiplier_for,
)
from botorch_fed.protocols.base import AgentId, Outbox, Pending
from botorch_fed.protocols.budget import Budgeted, missing_points, no_round, note_one_site
from botorch_fed.protocols.fts import SAID, check_agreement, received_features, weight_message
from botorch_fed.protocols.noisy_prior import (
    CLOSE,
    EARLY,
    MIN_RELIABILITY,
    Heard,
    Outlook,
    hear,
    heard_prior,
    share_of,
    spoken,
)
from botorch_fed.protocols.own_step import (
    OwnStrategy,
    answered,
    check_data,
    check_designs,
    check_public_points,
    design_of,
    public_data,
    random_point,
    tensor_hash,
    untried,
)
from botorch_fed.protocols.store import Blobs, MemoryBlobs
from botorch_fed.protocols.transfer_search import (
    MIN_OWN,
    Advice,
    TransferSearch,
    check_active,
    check_default,
    check_start,
    default_point,
    first_points,
)
from botorch_fed.rng import Generator, generator
from botorch_fed.space import SearchSpace, Value
from botorch_fed.wire.codec import content_hash, encode

logger = logging.getLogger(__name__)

MAX_WEIGHT = 1e6  # of a release's entries: beyond it nothing is a mean of clipped messages
MAX_NOISE = 1e100  # deviation of a release's noise: its square and their sums are finite
NUM_REFERENCE = 512  # public points on which a gain is projected
REDRAWS = 100  # of initial points that snapping moved out of their region
RIDGE = 1e-3  # of that projection
MessageKind = Literal["own_mean", "gain", "mean", "sample"]
_SAID = {**SAID, "gain": "the expected improvement under its own model"}
NoiseKind = Literal["correlated", "tight", "paper", "none"]
Sampling = PoissonSampling | FixedSizeSampling


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, eq=False)
class Setup:
    r"""What all agents agree upon, in public.

    Attributes:
        space: The map of inputs and outcomes.
        features: The shared basis, as `FeatureMap.to_tensors` gives it.
        noise_var: :math:`\sigma^2` of the model that weight messages are made with.
        message: ``"own_mean"``: the mean of the agent's own fitted model, as `noisy_prior` says;
            ``"gain"``: its expected improvement; both scaled to the clip norm. Or a weight vector
            of a posterior over the basis, the ``"mean"`` or a ``"sample"``.
        beta: :math:`\beta_t`: scales the deviation of a sample from the mean.
        clip_norm: The bound on a message's norm.
        partition: The regions.
        regions: Every agent's own region.
        num_initial: How many points an agent evaluates first: in its own region, or dealt.
        ridge: :math:`\lambda` of a gain's projection on the basis: larger keeps what the basis
            resolves badly out of a message.
        promise: What the whole run reveals about one agent at most; None if it is not private.
        min_reliability: The share of agreement in what was released below which agents with
            `TransferSearch` go on alone, see `noisy_prior`.
        default: With ``"own_mean"``, what an agent without data evaluates first, `1 x d`: the first
            of `num_initial` points. Public, and so no part of what is protected.
        sampling_rate: The share of agents that a release is expected to be made of.
    """

    space: SearchSpace
    features: Mapping[str, Tensor]
    noise_var: float
    message: MessageKind
    beta: float
    clip_norm: float
    partition: Partition
    regions: Mapping[AgentId, int]
    num_initial: int
    ridge: float
    promise: Guarantee | None
    min_reliability: float = MIN_RELIABILITY
    default: Tensor | None = None
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        check_default(self.default, self.space.dim, self.num_initial)
        if not 0 < self.sampling_rate <= 1:
            raise InputDataError(f"sampling_rate must lie in (0, 1], got {self.sampling_rate}.")
        if self.default is not None and self.message != "own_mean":
            raise InputDataError('A default goes with message="own_mean" only.')
        if not 0 <= self.min_reliability < 1:
            raise InputDataError(f"min_reliability must lie in [0, 1), got {self.min_reliability}.")
        if self.message == "own_mean" and self.partition.num_regions > 1:
            raise InputDataError(
                'message="own_mean" is about the whole space: num_regions must be 1, got '
                f"{self.partition.num_regions}."
            )
        if not (1e-12 <= self.noise_var <= 1e6 and 0 <= self.beta <= 1e3):
            raise InputDataError(
                "noise_var must lie between 1e-12 and 1e6 and beta between 0 and 1,000, got "
                f"{self.noise_var} and {self.beta}."
            )
        if not 1e-6 <= self.clip_norm <= MAX_WEIGHT:
            raise InputDataError(
                f"clip_norm must lie between 1e-6 and {MAX_WEIGHT:g}, got {self.clip_norm}."
            )
        if not 1e-9 <= self.ridge <= 1e9:
            raise InputDataError(f"ridge must lie between 1e-9 and 1e9, got {self.ridge}.")
        if self.partition.dim != self.space.dim:
            raise InputDataError(
                f"The regions have {self.partition.dim} dimensions, the space {self.space.dim}."
            )
        if not all(0 <= region < self.partition.num_regions for region in self.regions.values()):
            raise InputDataError(f"Regions are 0..{self.partition.num_regions - 1}.")
        if not 0 <= self.num_initial <= 10_000:
            raise InputDataError(f"num_initial must lie in 0..10,000, got {self.num_initial}.")


@dataclass(frozen=True)
class Query:
    """What an agent is to do in a round; `share` is for who does not query any more."""

    phase: Literal["start", "query", "share"]
    upload: bool


@dataclass(frozen=True, eq=False)
class Upload:
    """An agent's message, if it was asked for one and has data."""

    weights: Tensor | None = field(repr=False)


@dataclass(frozen=True, eq=False)
class Released:
    """The newest release: made after round `made`, one row of `weights` per region, `P x M`.

    Attributes:
        made: After which round.
        weights: One row per region.
        noise_std: The deviation of the noise in each row, `P` public numbers.
    """

    made: int
    weights: Tensor
    noise_std: Tensor


# ------------------------------------------------------------------ the agent


@dataclass(frozen=True, kw_only=True)
class Following(OwnStrategy):
    r"""How an agent uses releases and its own data; its own business, nobody else needs to know.

    The first `follow` queries after the start go where the newest release is largest. From then on
    a coin with probability :math:`p_t` decides between an own step and the release.

    Attributes:
        follow: How many queries follow the releases.
        spread: How far they stay from each other, in the unit cube.
    """

    follow: int = 6
    spread: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow < 0:
            raise InputDataError(f"follow counts from 0, got {self.follow}.")
        if not 0 <= self.spread < 1:
            raise InputDataError(f"spread must lie in [0, 1), got {self.spread}.")


def paper_following() -> Following:
    """What an agent does in [Dai2021]_: :math:`1 - p_t = 1/t`, its own GP by maximum likelihood."""
    return Following(
        schedule=Polynomial(1.0),
        follow=0,
        spread=0.0,
        warp=False,
        paper_gp=True,
        min_distance=0.0,
        num_features=100,
    )


@dataclass(frozen=True, eq=False)
class DPFTSDEAgentState:
    """An agent's private state.

    Attributes:
        t: Queries told so far, the start not counted.
        phase: What is still to be asked in this round.
        uploading: Whether the round asks for a message.
        setup: Hash of the `Setup`.
        released: Hash of `Released`, if there is one to listen to.
        X: Own points in the unit cube, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        own: Hyperparameters of the own model; None with `TransferSearch`, which fits it anew.
        heard: The releases so far, with `TransferSearch`.
        failed: Points whose evaluation failed, `n x d`.
    """

    t: int
    phase: Literal["start", "query", "share", "rest"]
    uploading: bool
    setup: str
    released: str | None
    X: Tensor = field(repr=False)
    Y: Tensor = field(repr=False)
    own: OwnHyperparameters | None = field(repr=False)
    heard: Heard | None
    failed: Tensor = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class DPFTSDEAgent:
    """One site of DP-FTS-DE.

    Args:
        name: Its name; the server's roster has it.
        space: The map of inputs and outcomes; must be the server's.
        seed: Its own seed, private.
        strategy: How it uses releases and data.
        require: The most that a run may reveal about it: a server that promises less privacy, or
            none, is refused.
        data: Observations that it has already: points in the unit cube `n x d` and outcomes as
            the site measures them `n x 1`.
        candidates: The only points that it can evaluate, `K x d`; default the whole unit cube.
        initial_design: Points `k x d` that it evaluates at the start, instead of those that it is
            dealt, or of random ones in its own region.
        blobs: Where broadcasts lie.
    """

    name: AgentId
    space: SearchSpace
    seed: int = field(repr=False)
    strategy: TransferSearch | Following = TransferSearch()  # noqa: RUF009 - frozen
    require: Budget | None = None
    data: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    candidates: Tensor | None = None
    initial_design: Tensor | None = None
    blobs: Blobs = field(default_factory=MemoryBlobs)

    state_type = DPFTSDEAgentState
    accepts = (Query,)
    defers = True

    def __post_init__(self) -> None:
        d = self.space.dim
        check_public_points(self.candidates, self.initial_design, d)
        if self.data is not None:
            check_data(self.data, d)

    @property
    def fingerprint(self) -> str:
        """Hash of the settings that determine what it asks for."""
        tensors = [tensor_hash(self.candidates), tensor_hash(self.initial_design)]
        strategy = self.strategy
        how = strategy.settings if isinstance(strategy, TransferSearch) else strategy
        settings = (self.name, self.space.fingerprint, self.seed, how, self.require)
        return hashlib.sha256(repr((settings, tensors)).encode()).hexdigest()

    @property
    def _following(self) -> Following:
        assert isinstance(self.strategy, Following)
        return self.strategy

    # -------------------------------------------------------------- four verbs

    def start(self) -> DPFTSDEAgentState:
        """The state before the first request: with the data that the site has already."""
        X, Y = public_data(self.space, self.data)
        return self._fitted(DPFTSDEAgentState(0, "rest", False, "", None, X, Y, None, None, X[:0]))

    def check(self, state: DPFTSDEAgentState, request: Query, broadcasts: tuple[str, ...]) -> None:
        """Raise `MessageError` unless the request and what it broadcasts fit."""
        if len(broadcasts) not in (1, 2):
            raise MessageError(f"Expected a setup and a release, got {len(broadcasts)} broadcasts.")
        setup, phi = _setup(self.blobs, broadcasts[0])
        check_agreement(self.space, setup.space, phi)
        if state.setup not in ("", broadcasts[0]):
            raise MessageError("The setup has changed during the run.")
        if self.name not in setup.regions:
            raise MessageError("This site is not on the roster: it has no region.")
        if request.phase == "start" and state.setup:
            raise MessageError("The start is asked for first, and once.")
        transfers = isinstance(self.strategy, TransferSearch)
        if transfers != (setup.message == "own_mean"):
            raise MessageError(
                f"This agent's strategy {type(self.strategy).__name__!r} does not go with messages "
                f"of kind {setup.message!r}."
            )
        if request.upload and setup.message == "gain" and self._following.own == "random":
            raise MessageError('message="gain" needs an own model: own must not be "random".')
        if setup.promise is not None and not setup.promise.releases:  # nothing is revealed
            if request.upload and self.require is not None:
                raise MessageError("The server promised to release nothing, and asks for one.")
        else:
            check_promise(setup.promise, self.require)
        if len(broadcasts) == 2:
            _released(self.blobs, broadcasts[1], broadcasts[0])

    def receive(
        self, state: DPFTSDEAgentState, request: Query, broadcasts: tuple[str, ...]
    ) -> DPFTSDEAgentState:
        """The state after a request: what to do, and where the broadcasts lie."""
        return replace(
            state,
            phase=request.phase,
            uploading=request.upload,
            setup=broadcasts[0],
            released=broadcasts[1] if len(broadcasts) > 1 else None,
            heard=self._heard(state, broadcasts),
        )

    def _heard(self, state: DPFTSDEAgentState, broadcasts: tuple[str, ...]) -> Heard | None:
        """What was heard so far, with the release that has just come."""
        if len(broadcasts) < 2 or not isinstance(self.strategy, TransferSearch):
            return state.heard
        setup, _ = _setup(self.blobs, broadcasts[0])
        released = _released(self.blobs, broadcasts[1], broadcasts[0])
        return hear(
            state.heard,
            released.made,
            released.weights[0],
            float(released.noise_std[0]),
            share=share_of(released.made, setup.num_initial),
        )

    def wants(self, state: DPFTSDEAgentState) -> bool:
        """Whether the start or a query is still to be made."""
        return state.phase == "query" or (state.phase == "start" and len(self._design(state)) > 0)

    def ask(
        self, state: DPFTSDEAgentState, pending: Tensor | None = None
    ) -> Tensor | Pending | None:
        """The initial points `n x d`, the next one `1 x d`, or None if nothing is to be done."""
        if state.phase in ("rest", "share") or (pending is not None and len(pending)):
            return None
        if state.phase == "start":
            design = self._design(state)
            return design if len(design) else None
        point = self._point(state)
        return point if self.candidates is not None else self.space.snap(point)

    def left(self, state: DPFTSDEAgentState, pending: int) -> int:
        """One query at a time, or the points of the start."""
        if pending or not self.wants(state):
            return 0
        return 1 if state.phase == "query" else len(self._design(state))

    def tell(self, state: DPFTSDEAgentState, X: Tensor, Y: Tensor) -> DPFTSDEAgentState:
        """The state after a query; needs no broadcast, so that a late value can always be told."""
        X, Y, failed = answered(X, Y)
        state = replace(
            state,
            t=state.t + (state.phase == "query"),
            phase="rest",
            failed=torch.cat([state.failed, failed]),
        )
        return self.attach(state, X, Y)

    def attach(self, state: DPFTSDEAgentState, X: Tensor, Y: Tensor) -> DPFTSDEAgentState:
        """The state with more data."""
        Y = self.space.outcome.to_public(Y)
        state = replace(state, X=torch.cat([state.X, X]), Y=torch.cat([state.Y, Y]))
        return self._fitted(state)

    def reply(self, state: DPFTSDEAgentState) -> tuple[DPFTSDEAgentState, Upload]:
        """The agent's message, a function of all its data."""
        if not self.wants(state):
            state = replace(state, phase="rest")
        if not state.uploading or len(state.X) == 0:
            return state, Upload(None)
        try:
            weights = self._message(state)
        except NumericalError:  # e.g. tiny noise_var and a point tried twice: others need not wait
            logger.warning("agent %r has no message for its %d points", self.name, len(state.X))
            return state, Upload(None)
        if weights is None or not bool(weights.isfinite().all()):
            return state, Upload(None)
        return state, Upload(weights)

    def _message(self, state: DPFTSDEAgentState) -> Tensor | None:
        setup, phi = _setup(self.blobs, state.setup)
        if isinstance(self.strategy, TransferSearch):
            own = self.strategy.message(self.space, phi, state.X, state.Y)
            return None if own is None else spoken(phi, own, setup.clip_norm)
        if setup.message != "gain":
            stream = generator(self.seed, "message", state.t)
            return make_message(setup, phi, state.X, state.Y, generator=stream)
        assert state.own is not None  # `check` has seen to it
        model = self.strategy.model(self.space, state.X, state.Y, state.own)
        return gain_message(setup, phi, model, state.X)

    # -------------------------------------------------------------- where the next points come from

    def _design(self, state: DPFTSDEAgentState) -> Tensor:
        """The points at the start: given, dealt, or random ones of the own region.

        Random ones are of the candidates in the region, if there are any.
        """
        if self.initial_design is not None:
            return self.initial_design.double()
        setup, _ = _setup(self.blobs, state.setup)
        if isinstance(self.strategy, TransferSearch):
            # What it has already need not be dealt.
            return self._dealt(setup, setup.num_initial - len(state.X), bool(len(state.X)))
        region, count = setup.regions[self.name], setup.num_initial
        stream = generator(self.seed, "initial")
        if self.candidates is None:
            return self._uniform_in(setup.partition, region, count, stream)
        inside = self.candidates[setup.partition.region_of(self.candidates) == region]
        pool = inside if len(inside) else self.candidates
        order = stream.uniform(len(pool)).argsort(stable=True)
        rows = order.repeat(-(-count // len(pool)))[:count]  # again from the first if they run out
        return pool[rows].double()

    def _dealt(
        self, setup: Setup, count: int, has_data: bool = False, tried: Tensor | None = None
    ) -> Tensor:
        """The first points of a site, `count x d`."""
        names, candidates = sorted(setup.regions), self.candidates
        if candidates is not None and tried is not None:
            candidates = untried(candidates, tried)
        return first_points(
            self.space,
            names.index(self.name),
            len(names),
            count,
            default=None if has_data else setup.default,
            candidates=candidates,
        )

    def _uniform_in(
        self, partition: Partition, region: int, count: int, stream: Generator
    ) -> Tensor:
        """Random points of a region that the site can evaluate, `count x d`.

        Integers and choices lie on a grid: what snapping moves to a neighbour is drawn again. A
        region without any such point is left for the nearest ones.
        """
        points = torch.zeros(count, self.space.dim).double()
        outside = torch.ones(count, dtype=torch.bool)
        for _ in range(REDRAWS):
            fresh = stream.uniform(int(outside.sum()), self.space.dim)
            points[outside] = self.space.snap(partition.to_region(region, fresh))
            outside = partition.region_of(points) != region
            if not bool(outside.any()):
                break
        return points

    def _point(self, state: DPFTSDEAgentState) -> Tensor:
        """The next point, `1 x d`."""
        t = state.t + 1
        stream = generator(self.seed, "point", t)
        chosen = torch.zeros(0, self.space.dim).double()
        strategy = self.strategy
        if isinstance(strategy, TransferSearch):
            advice, (setup, _) = self._advice(state), _setup(self.blobs, state.setup)
            if advice is None and setup.num_initial < MIN_OWN and len(state.X) < MIN_OWN:
                # A newcomer that nobody tells anything.
                dealt = self._dealt(setup, MIN_OWN, tried=state.X)
                return dealt[min(len(state.X), len(dealt) - 1) :][:1]
            return strategy.point(
                self.space,
                state.X,
                state.Y,
                advice,
                chosen=chosen,
                candidates=self.candidates,
                failed=state.failed,
                stream=stream,
            )
        if state.released is not None and t <= strategy.follow:
            # Several queries may follow one release: each looks at another part of it.
            return self._released_point(state, stream, strategy.spread)
        coin = float(generator(self.seed, "coin", t).uniform(1))
        if state.released is not None and coin >= strategy.schedule(t):
            return self._released_point(state, stream, 0.0)
        if state.own is None or strategy.own == "random":
            return random_point(self.space, self._candidates(state, 0.0), stream)
        model = strategy.model(self.space, state.X, state.Y, state.own)
        return strategy.maximizer(
            strategy.acquisition(model, state.X, chosen, stream),
            self.space,
            state.X,
            candidates=self._candidates(state, 0.0),
            stream=stream,
        )

    def _advice(self, state: DPFTSDEAgentState) -> Advice | None:
        """What the releases say, while there is something to listen to."""
        if state.released is None:
            return None
        setup, phi = _setup(self.blobs, state.setup)
        prior = heard_prior(
            phi,
            state.heard,
            alone=setup.clip_norm**2 / (setup.sampling_rate * len(setup.regions)),
            min_reliability=setup.min_reliability,
        )
        return None if prior is None else Advice(prior)

    def _released_point(self, state: DPFTSDEAgentState, stream: Generator, spread: float) -> Tensor:
        """Where the newest release is largest, `spread` away from earlier queries."""
        assert state.released is not None
        strategy = self._following
        setup, phi = _setup(self.blobs, state.setup)
        released = _released(self.blobs, state.released, state.setup)
        point, _ = maximize(
            ThompsonSampling(weight_path(phi, released.weights), setup.partition),
            self.space.dim,
            generator=stream,
            candidates=self._candidates(state, spread),
            log_warp=strategy.log_warp(self.space),
            tried=state.X[len(state.X) - state.t :],
            min_distance=max(spread, strategy.min_distance),
            partition=setup.partition,
            num_raw=strategy.num_raw,
            num_restarts=strategy.num_restarts,
        )
        return point

    def _candidates(self, state: DPFTSDEAgentState, spread: float) -> Tensor | None:
        """The candidates that are worth a look: not tried before, and away from earlier queries."""
        if self.candidates is None or self._following.min_distance == 0:
            return self.candidates
        fresh = untried(self.candidates, state.X)
        if spread == 0 or state.t == 0:
            return fresh
        warp, there = self._following.log_warp(self.space), state.X[len(state.X) - state.t :]
        far = torch.cdist(warp.transform(fresh), warp.transform(there)).amin(dim=-1) >= spread
        return fresh[far] if bool(far.any()) else fresh

    def _fitted(self, state: DPFTSDEAgentState) -> DPFTSDEAgentState:
        """The state with the hyperparameters that its data ask for."""
        if isinstance(self.strategy, TransferSearch):  # fitted anew for each query
            return state
        own = self.strategy.refit(
            self.space, state.X, state.Y, state.own, seed=self.seed, name=self.name
        )
        return replace(state, own=own)


def check_promise(promise: Guarantee | None, require: Budget | None) -> None:
    """Raise `MessageError` unless a server promises as much privacy as a site requires."""
    if require is None:
        return
    wanted = f"({require.epsilon:g}, {require.delta:g})"
    if promise is None or not promise.private:
        raise MessageError(f"This site requires {wanted}-DP, the server promises none.")
    if promise.unit != "agent":
        raise MessageError(
            f"This site requires {wanted}-DP for all that it sends, the server promises it per "
            f"{promise.unit}."
        )
    if promise.epsilon > require.epsilon or promise.delta > require.delta:
        raise MessageError(
            f"This site requires {wanted}-DP, the server promises "
            f"({promise.epsilon:.4g}, {promise.delta:.4g})."
        )


def make_message(
    setup: Setup, feature_map: FeatureMap, X: Tensor, Y: Tensor, *, generator: Generator
) -> Tensor:
    """An agent's posterior on the shared basis, `M` weights: what published kinds send.

    Args:
        setup: Says which kind of message.
        feature_map: The basis of the setup.
        X: Own points, `n x d`.
        Y: Own outcomes on the public scale, `n x 1`.
        generator: The agent's own stream, for samples.
    """
    assert setup.message != "own_mean"  # `TransferSearch` makes that one, and `gain_message`
    assert setup.message != "gain"
    return weight_message(
        setup.message,
        feature_map,
        X,
        Y,
        noise_var=setup.noise_var,
        beta=setup.beta,
        generator=generator,
    )


def gain_message(
    setup: Setup, feature_map: FeatureMap, model: SingleTaskGP, tried: Tensor
) -> Tensor:
    r"""An agent's expected improvement as a function on the shared basis, of norm `clip_norm`.

    The weights solve :math:`\min_w \frac1R \sum_r (\phi(x_r)^\top w - g(x_r))^2 + \lambda \|w\|^2`
    over public points :math:`x_r`, and are scaled to the clip norm: an agent has one voice, however
    much it hopes to improve.

    Args:
        setup: Of the run.
        feature_map: The basis of the setup.
        model: The agent's own Gaussian process.
        tried: Points it has tried, `n x d`.
    """
    reference, projection = _projection(feature_map, setup.ridge)
    with torch.no_grad():
        best = model.posterior(tried).mean.max()
        posterior = model.posterior(reference)
        mean, std = posterior.mean.squeeze(-1), posterior.variance.squeeze(-1).sqrt()
    weights = projection @ expected_gain(mean, std, best)
    norm = weights.norm()
    if not bool(norm > 0):  # nothing to gain anywhere: an agent without a voice
        return torch.zeros_like(weights)
    return weights * (setup.clip_norm / norm)


def expected_gain(mean: Tensor, std: Tensor, best: Tensor) -> Tensor:
    r"""Expected improvement over `best`: :math:`\sigma (u \Phi(u) + \varphi(u))`."""
    std = std.clamp_min(1e-12)
    u = (mean - best) / std
    density = torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)
    return std * (u * torch.special.ndtr(u) + density)


def reference_points(dim: int, count: int = NUM_REFERENCE) -> Tensor:
    """Public points that represent the cube: the first of Sobol's sequence."""
    return torch.quasirandom.SobolEngine(dim, scramble=False).draw(count, dtype=torch.float64)


@lru_cache(maxsize=16)
def _projection(feature_map: FeatureMap, ridge: float) -> tuple[Tensor, Tensor]:
    """Reference points `R x d`, and the matrix `M x R` from values there to weights."""
    reference = reference_points(feature_map.input_dim)
    Phi = feature_map(reference)
    gram = Phi.mT @ Phi / len(Phi) + ridge * torch.eye(Phi.shape[-1]).double()
    factor = cholesky(gram, "the projection on the shared basis")
    return reference, torch.cholesky_solve(Phi.mT / len(Phi), factor)


@lru_cache(maxsize=16)
def _setup(blobs: Blobs, digest: str) -> tuple[Setup, FeatureMap]:
    """A setup and its feature map; public, and the same for all agents of a process."""
    setup: Setup = blobs.load(digest, Setup)
    return setup, received_features(setup.features, setup.space)


@lru_cache(maxsize=16)
def _released(blobs: Blobs, digest: str, setup_digest: str) -> Released:
    """A release, checked; the same for all agents of a process."""
    released: Released = blobs.load(digest, Released)
    setup, phi = _setup(blobs, setup_digest)
    if released.made < 0:
        raise MessageError("Rounds count from 0.")
    P = setup.partition.num_regions
    weights, noise = released.weights, released.noise_std
    if weights.shape != (P, phi.num_features) or weights.dtype != torch.float64:
        raise MessageError(
            f"A release must be a float64 `{P} x {phi.num_features}` tensor, got {weights.dtype} "
            f"of shape {tuple(weights.shape)}."
        )
    if not bool((weights.abs() <= MAX_WEIGHT).all()):
        raise MessageError(
            f"A release has a number beyond {MAX_WEIGHT:g}, or one that is not finite."
        )
    if noise.shape != (P,) or noise.dtype != torch.float64:
        raise MessageError(f"The noise of a release must be {P} float64 numbers.")
    if not bool(((noise >= 0) & (noise <= MAX_NOISE)).all()):  # false for NaN
        raise MessageError(f"The deviation of noise must lie in [0, {MAX_NOISE:g}].")
    return released


# ------------------------------------------------------------------ the server


@dataclass(frozen=True, eq=False)
class DPFTSDEServerState:
    """What the server keeps.

    Attributes:
        t: Finished rounds, the start included.
        released: The newest release.
        ledger: What this run has paid.
        signal: The signal-to-noise ratio of every release and region, as the release itself shows
            it; one row per release.
        exhausted: Whether a budget has run out: nothing more is released.
    """

    t: int
    released: Released | None
    ledger: Ledger
    signal: Tensor
    exhausted: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DPFTSDEServer:
    """The server of DP-FTS-DE: collects weight vectors and releases their noisy weighted sums.

    Args:
        setup: What all agents agree upon, without its promise: the server makes it.
        agents: Names of all agents, the public roster.
        rounds: How many queries each agent makes, `T`.
        releases: After which rounds something is released, of `0, …, T - 1`.
        exploration: How much an agent counts in its own region, round by round.
        noise_multiplier: Noise over the norm of one agent's contribution; None for no privacy.
        noise_kind: ``"correlated"``, ``"tight"`` for independent noise of the right size,
            ``"paper"`` for the published size, or ``"none"``: no privacy.
        sampling: Who takes part in a release.
        delta: Of the promise; default `N ** -1.1`.
        switch_to_local_after: The last round in which agents listen; default they always do.
        trim: How many of the largest and how many of the smallest messages are left out, coordinate
            by coordinate, see `trimmed_means`. Without privacy only: the guarantee is that of the
            clipped sum, in which every agent counts by public weights, and how much one message
            moves a trimmed mean depends on all others.
        ledger: What was paid before, and the budget of this run.
        books: A durable ledger, which pays as well: it may span several runs.
        noise: Where noise and secret coins come from.
        withheld: Instead of `releases`, what was planned and would be mostly noise: nothing is
            released, and the plan says why.
        active: Who queries; default all. The others are in the releases with what they have.
    """

    setup: Setup
    agents: tuple[AgentId, ...]
    rounds: int
    releases: tuple[int, ...]
    exploration: ExplorationSchedule
    noise_multiplier: float | None
    noise_kind: NoiseKind = "correlated"
    sampling: Sampling = PoissonSampling()  # noqa: RUF009 - frozen
    delta: float | None = None
    switch_to_local_after: int | None = None
    trim: int = 0
    ledger: Ledger = Ledger()  # noqa: RUF009 - frozen
    books: LedgerFile | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    withheld: tuple[int, ...] = ()
    active: tuple[AgentId, ...] | None = None

    state_type = DPFTSDEServerState
    accepts = (Upload,)

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise InputDataError("rounds count from 0.")
        if len(set(self.agents)) < len(self.agents) or not self.agents:
            raise InputDataError("There must be at least one agent, and names must differ.")
        check_active(self.active, self.agents)
        if set(self.setup.regions) != set(self.agents):
            raise InputDataError("Every agent needs a region, and nobody else may have one.")
        if list(self.releases) != sorted({*self.releases} & {*range(self.rounds)}):
            raise InputDataError(
                f"releases must ascend within 0..{self.rounds - 1}: what is released after the "
                f"last round is never used. Got {self.releases}."
            )
        if self.withheld and self.releases:
            raise InputDataError("Either something is released, or it is withheld.")
        if self.noise_kind not in get_args(NoiseKind):
            raise InputDataError(
                f"noise_kind is one of {get_args(NoiseKind)}, got {self.noise_kind!r}."
            )
        if (self.noise_kind == "none") != (self.noise_multiplier is None):
            raise InputDataError('noise_kind="none" is a run without privacy, and without noise.')
        if self.trim and self.noise_multiplier is not None:
            raise InputDataError(
                "A trimmed mean has no privacy guarantee, the proof is about the clipped sum: "
                'leave out trim, or the noise by noise_kind="none".'
            )
        if not 0 <= 2 * self.trim < len(self.agents):
            raise InputDataError(
                f"trim counts from 0, and less than half of the {len(self.agents)} agents can be "
                f"left out at each end, got {self.trim}."
            )
        if self.setup.promise is not None:
            raise InputDataError("The server makes the promise: leave it out of the setup.")
        last = self.switch_to_local_after
        if last is not None and self.releases and max(self.releases) >= last:
            raise InputDataError(
                f"Agents stop listening after round {last}: release nothing from then on."
            )
        if self.noise_multiplier is not None:
            # The whole plan is paid on paper first: a budget that does not cover it is refused now.
            self.ledger.spend(self.event, count=len(self.releases) or 1)
            self._check_books()
            assert self.promise is not None  # computed here, so that a bad delta is seen here
            if self.releases and self.outlook is None:
                self._mechanism(self.releases[0])  # warns, once, of releases that are all noise
            elif self.releases:
                self.mechanism(self.releases[0])  # noise is averaged out: `outlook` says how far
        elif self.books is not None or self.ledger.budget is not None:
            raise InputDataError("Without noise nothing can be paid: give a noise_multiplier.")

    def _check_books(self) -> None:
        if self.books is None:
            return
        if (self.books.adjacency, self.books.unit) != (self.ledger.adjacency, self.ledger.unit):
            raise InputDataError("The books are for another adjacency or unit.")
        # Other runs may use up the books at any time, and a resumed run has paid from them already.
        with contextlib.suppress(BudgetExceeded):
            self.books.ledger.spend(self.event)  # a value: nothing is written

    def __repr__(self) -> str:
        promise = "no privacy" if self.promise is None else str(self.promise)
        signal = ""
        if self.outlook is not None:
            signal = f", signal/noise={self.outlook.ratio(EARLY):.2g}"
        return (
            f"DPFTSDEServer(agents={len(self.agents)}, rounds={self.rounds}, "
            f"releases={len(self.releases)}, noise={self.noise_kind}{signal}, {promise})"
        )

    @property
    def fingerprint(self) -> str:
        """Hash of its settings."""
        settings = (
            content_hash(encode(self._promised_setup)),
            self.agents,
            self.releases,
            self.exploration,
            self.noise_multiplier,
            self.noise_kind,
            self.sampling,
            self.switch_to_local_after,
            *((self.trim,) if self.trim else ()),
            *(() if self.active is None else (self.active,)),
            self.noise.private,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    # -------------------------------------------------------------- what it costs

    @property
    def event(self) -> Event:
        """What one release costs."""
        assert self.noise_multiplier is not None
        return self.sampling.event(self.noise_multiplier, len(self.agents))

    @cached_property
    def promise(self) -> Guarantee | None:
        """What all releases of a run reveal about one agent at most; None without noise."""
        if self.noise_multiplier is None:
            return None
        delta = default_delta(len(self.agents)) if self.delta is None else self.delta
        return replace(
            compose(
                [self.event] * len(self.releases),
                delta=delta,
                adjacency=self.ledger.adjacency,
                unit=self.ledger.unit,
            ),
            private=self.noise.private,
        )

    @cached_property
    def outlook(self) -> Outlook | None:
        """How much signal to expect in what is planned; None without noise or `own_mean`."""
        planned = self.releases or self.withheld
        if self.noise_multiplier is None or not planned or self.setup.message != "own_mean":
            return None
        noise = float(self.mechanism(planned[0]).noise_std[0])
        silent = 0  # newcomers without first points have nothing to say
        if self.active is not None and self.setup.num_initial < MIN_OWN:
            silent = len(self.active)
        return Outlook(
            self._sampling_rate * len(self.agents),
            self._feature_map.num_features,
            noise / self.setup.clip_norm,
            tuple(share_of(t, self.setup.num_initial) for t in planned),
            1 - silent / len(self.agents),
        )

    @property
    def signal_words(self) -> str:
        """What the plan says of signal and noise; empty if there is nothing to say."""
        if self.outlook is None:
            return ""
        if not self.withheld:
            return self.outlook.words
        why = self.outlook.advice(self.setup.min_reliability, self.agreement)
        return f"{self.outlook.words} {why}"

    @property
    def agreement(self) -> float:
        """The correlation of messages to expect of related sites in the first release."""
        return EARLY if self.active is None else CLOSE

    @property
    def _sampling_rate(self) -> float:
        """The share of agents that a release is expected to be made of."""
        if isinstance(self.sampling, PoissonSampling):
            return self.sampling.rate
        return min(1.0, self.sampling.size / len(self.agents))

    @cached_property
    def _promised_setup(self) -> Setup:
        return replace(self.setup, promise=self.promise, sampling_rate=self._sampling_rate)

    def privacy(self, state: DPFTSDEServerState) -> dict[str, Any]:
        """What a report needs: the promise, what was paid, the noise and the signal beside it."""
        if self.price is None:
            return {"mechanism": "none", "private": False, "releases": len(self.releases)}
        return {
            **self.price.account(self.paid(state)),
            "exhausted": state.exhausted,
            "signal_to_noise": state.signal.tolist(),
            **({"signal": self.signal_words} if self.outlook is not None else {}),
        }

    def paid(self, state: DPFTSDEServerState) -> tuple[Entry, ...]:
        """All payments so far."""
        return state.ledger.entries

    @cached_property
    def price(self) -> Price | None:
        """What a run costs in privacy; None without noise."""
        if self.promise is None:
            return None
        mechanism = self.mechanism(self.releases[0]) if self.releases else None
        return Price(
            guarantee=self.promise,
            event=self.event,
            payments=len(self.releases),
            releases=len(self.releases),
            mechanism="none" if mechanism is None else type(mechanism).__name__,
            settings="none" if mechanism is None else repr(mechanism),
            noise_std=0.0 if mechanism is None else float(mechanism.noise_std.max()),
            trust=self.sees.trust,
            paid_at="hub",
        )

    @cached_property
    def sees(self) -> Sees:
        """Who sees what."""
        M, P = self._feature_map.num_features, self.setup.partition.num_regions
        noisy = self.noise_multiplier is not None
        settings = "search space, shared basis, regions, message settings and the promise"
        order = "whether to start, to query or to share, and whether to upload"
        setup = Row.of(Setup, "server", settings, EVERYBODY)
        query = Row.of(Query, "server", order, ADDRESSEE)
        if not self.releases:
            reply = Row.of(Upload, "agent", "an acknowledgement without data", ("server",))
            return Sees((setup, query, reply), "Nothing is released: no party has to be trusted.")
        sums = "sum" if P == 1 else f"sums, one for each of {P} regions,"
        upload = Row.of(
            Upload,
            "agent",
            f"each agent's message: {_SAID[self.setup.message]}, {M} numbers without noise",
            ("server",),
            "data",
        )
        released = Row.of(
            Released,
            "server",
            f"the {'noisy ' if noisy else ''}weighted {sums} of clipped messages"
            + (", and the size of the noise" if noisy else ""),
            EVERYBODY,
            "noisy data" if noisy else "data",
        )
        rows = (setup, query, upload, released)
        if not noisy:
            return Sees(
                rows,
                "The server is trusted with every message and all agents with sums of them.",
            )
        return Sees(
            rows,
            "The server is trusted with every message and adds the noise; the guarantee is "
            "against all other agents together, not against the server.",
        )

    def mechanism(self, t: int) -> GaussianMechanism:
        """The noisy sum that is released after round `t`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SignalWarning)  # the constructor has warned
            return self._mechanism(t)

    def _mechanism(self, t: int) -> GaussianMechanism:
        assert self.noise_multiplier is not None
        regions = tuple(self.setup.regions[agent] for agent in self.agents)
        contrast = self.exploration(t + 1)  # the release of round t is the (t + 1)-th the paper has
        common: dict[str, Any] = {
            "num_agents": len(self.agents),
            "dim": self._feature_map.num_features,
            "clip_norm": self.setup.clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "sampling": self.sampling,
            "adjacency": self.ledger.adjacency,
            "unit": self.ledger.unit,
        }
        P = self.setup.partition.num_regions
        if self.noise_kind == "correlated":
            return CorrelatedGaussianSum(
                regions=regions, num_regions=P, contrast=contrast, **common
            )
        return WeightedGaussianSum(
            weights=exploration_weights(regions, P, contrast),
            paper_noise=self.noise_kind == "paper",
            **common,
        )

    @cached_property
    def _feature_map(self) -> FeatureMap:
        return feature_map_from_tensors(self.setup.features)

    # -------------------------------------------------------------- the rounds

    def start(self) -> DPFTSDEServerState:
        """The state before the start."""
        signal = torch.zeros(0, self.setup.partition.num_regions).double()
        return DPFTSDEServerState(0, None, self.ledger, signal, False)

    def outbox(self, state: DPFTSDEServerState) -> Outbox | None:
        """The start, then one query per agent and round."""
        if state.t > self.rounds:
            return None
        query = Query("start" if state.t == 0 else "query", self._uploading(state))
        broadcasts: tuple[Any, ...] = (self._promised_setup,)
        last = self.switch_to_local_after
        if state.released is not None and (last is None or state.t <= last):
            broadcasts += (state.released,)
        queries = dict.fromkeys(self.agents if self.active is None else self.active, query)
        if query.upload:
            queries |= dict.fromkeys(self._done, Query("share", True))
        return Outbox(queries, broadcasts)

    @property
    def _done(self) -> list[AgentId]:
        """Who does not query."""
        return [] if self.active is None else [a for a in self.agents if a not in self.active]

    def _uploading(self, state: DPFTSDEServerState) -> bool:
        return state.t in self.releases and not state.exhausted

    def check(self, state: DPFTSDEServerState, sender: AgentId, message: Upload) -> None:
        """Raise `MessageError` unless an upload fits the basis and was asked for."""
        if message.weights is None:
            return
        if not self._uploading(state):
            raise MessageError("A weight vector that nobody asked for.")
        M = self._feature_map.num_features
        weights = message.weights
        if weights.shape != (M,) or weights.dtype != torch.float64:
            raise MessageError(
                f"A message has {M} float64 numbers, got {weights.dtype} of shape "
                f"{tuple(weights.shape)}."
            )
        if not bool(torch.isfinite(weights).all()):
            raise MessageError("A message has a number that is not finite.")

    def step(
        self, state: DPFTSDEServerState, inbox: Mapping[AgentId, Upload]
    ) -> DPFTSDEServerState:
        """Release, if the round says so; an absent agent counts as a zero contribution."""
        after = replace(state, t=state.t + 1)
        if not self._uploading(state):
            return after
        given = {
            index: message.weights
            for index, agent in enumerate(self.agents)
            if (message := inbox.get(agent)) is not None and message.weights is not None
        }
        if self.noise_multiplier is None:
            if self.trim and len(given) <= 2 * self.trim:
                logger.warning(
                    "round %d releases nothing: %d messages are too few to leave out %d at each "
                    "end",
                    state.t,
                    len(given),
                    self.trim,
                )
                return after
            clean = self._plain(state.t, given)
            silence = torch.zeros(len(clean)).double()
            return replace(after, released=_within_limits(state.t, clean, silence))
        try:
            release, ledger = self._release(state, given)
        except BudgetExceeded as error:
            logger.warning("round %d releases nothing: %s", state.t, error)
            return replace(after, exhausted=True)
        noisy = self.outlook is None and bool((release.signal_to_noise < 1).any())
        if noisy and not len(state.signal):  # said once
            logger.warning(
                "the release after round %d is mostly noise: fewer features or releases, or more "
                "agents would help",
                state.t,
            )
        return replace(
            after,
            released=_within_limits(state.t, release.values, release.noise_std),
            ledger=ledger,
            signal=torch.cat([state.signal, release.signal_to_noise.unsqueeze(0)]),
        )

    def _release(
        self, state: DPFTSDEServerState, given: Mapping[int, Tensor]
    ) -> tuple[Release, Ledger]:
        mechanism = self.mechanism(state.t)
        if self.books is not None:  # first what survives a crash
            self.books.spend(
                mechanism.event,
                note=f"DP-FTS-DE, round {state.t}",
                private=self.noise.private,
            )
        return mechanism.release(
            given, ledger=state.ledger, noise=self.noise, path=("release", state.t)
        )

    def _plain(self, t: int, given: Mapping[int, Tensor]) -> Tensor:
        """The weighted sums without noise or sampling, for the comparison that is not private."""
        P, M = self.setup.partition.num_regions, self._feature_map.num_features
        regions = [self.setup.regions[agent] for agent in self.agents]
        weights = exploration_weights(regions, P, self.exploration(t + 1))
        rows = torch.zeros(len(self.agents), M, dtype=torch.float64)
        for index, vector in given.items():
            rows[index] = clip(vector, self.setup.clip_norm)
        if not self.trim:
            return weights @ rows
        present = sorted(given)
        return trimmed_means(rows[present], weights[:, present], trim=self.trim)


def _within_limits(t: int, values: Tensor, noise_std: Tensor) -> Released:
    """A release that agents accept."""
    return Released(t, values.clamp(-MAX_WEIGHT, MAX_WEIGHT), noise_std)


def trimmed_means(vectors: Tensor, weights: Tensor, *, trim: int) -> Tensor:
    """Weighted means without the extremes of each coordinate.

    In every coordinate the `trim` largest and the `trim` smallest numbers are left out, and the
    others keep their weights, which are made to add up to one. If no more than `trim` vectors are
    dishonest, every number of the result lies between the smallest and the largest of the honest
    ones: nobody moves it further than that.

    It does not prevent a bias within that range, which may be wide where honest agents differ, and
    they do: what is left out is also what is special about one agent. Nor does it prevent more than
    `trim` agents acting together, nor vectors that are wrong as a whole and unremarkable in every
    coordinate. With weights that differ, one vector may still carry most of what is left. Who is
    absent is left out, and does not count as zero.

    Args:
        vectors: `N x M`, more than twice `trim`.
        weights: `P x N`, positive: one row per mean.
        trim: How many are left out at each end.

    Returns:
        `P x M` means.
    """
    order = vectors.argsort(dim=0, stable=True)[trim : len(vectors) - trim]  # K x M
    kept = vectors.gather(0, order)
    shares = weights[:, order]  # P x K x M
    means = (shares * kept).sum(dim=1) / shares.sum(dim=1).clamp_min(1e-300)
    return means.clamp(kept.amin(dim=0), kept.amax(dim=0))  # against rounding


def default_delta(num_agents: int) -> float:
    r"""The papers' :math:`\delta = N^{-1.1}`; large: look at :math:`10^{-5}` beside it."""
    return float(max(num_agents, 2) ** -1.1)


# ------------------------------------------------------------------ a federation for `run`


def quiet_server(study: Any, space: SearchSpace, names: tuple[AgentId, ...]) -> Any:
    """The server of a study that is only asked what it says: the run's own server warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        return study.server(space, names)


class _BooksElsewhere:
    """Of a copy of a study, e.g. in a worker process: it makes agents, and no server."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProtocolError(
            "A copy of a study cannot pay: its books stay with the one they were opened for. Use "
            "that one, or dataclasses.replace."
        )


NUM_FEATURES = 20
LENGTHSCALE = 0.5  # of the unit cube, in two dimensions
RELEASES = (0, 4)  # of means, which are averaged
FOLLOWED = (0, 1, 2, 3)  # with `Following`, which looks at the newest
FIRST_POINTS = 10  # with `Following`


@dataclass(frozen=True, kw_only=True, eq=False)
class DPFTSDE(Budgeted):
    """DP-FTS-DE as a study: the settings of all agents and of the server.

    Args:
        budget: How many evaluations each active agent makes, the initial ones included. The number
            of rounds is ``T = budget - initial points``, of the agent that lacks most of them; one
            that has data for some evaluates fewer.
        epsilon: What the whole run may reveal about one agent; the noise follows from it.
        noise_multiplier: Instead of `epsilon`, the noise itself.
        delta: Beside `epsilon`; default `N ** -1.1`.
        releases: After which rounds something is released; default 0 and 4, or 0 alone where
            `active` are newcomers to others who have finished; with `Following` 0, 1, 2 and 3.
            ``"all"`` for 0, …, T - 1.
        num_regions: The number `P` of regions; 1 is DP-FTS.
        exploration: How much an agent counts in its own region.
        sampling: Who takes part in a release.
        noise_kind: See `DPFTSDEServer`; ``"none"`` is FTS-DE, which is not private.
        message: What agents send, see `Setup`; default ``"own_mean"``, with `Following`
            ``"gain"``.
        clip_norm: The bound on a message's norm; default 1 for own means and gains, which fill it,
            and `suggested_clip_norm` for others.
        feature_map: The shared basis; default `default_private_features`, with `TransferSearch`
            on the scale of the own model.
        noise_var: Noise variance that weight messages are made with, on the public scale.
        beta: Scale of a sample's deviation from the mean.
        num_initial: How many points every agent evaluates first; default 3, of which those that
            it has data for are left out, or with `active` none but the `default`; with `Following`
            10 in its own region.
        default: The configuration that users have had so far, a value for each parameter: every
            agent without data evaluates it first, as the first of `num_initial` points, and can
            only gain on it. Public: never one that was found on the agents' data. With
            `TransferSearch`, and instead of an `initial_design`.
        ridge: Of a gain's projection on the basis, see `Setup`.
        strategy: How agents use releases and data.
        min_reliability: With `TransferSearch`, the least share of agreement that is listened to. A
            run in which even early messages of related agents would have less, all releases
            together, releases nothing, spends nothing and warns; 0 for releases in any case.
        switch_to_local_after: The last round in which agents listen; default they always do.
        active: Who queries; default all. The others, who have finished, are in the releases with
            the data that they have, and pay for them like everybody.
        trim: How many messages are left out at each end of every coordinate, see `DPFTSDEServer`;
            with ``noise_kind="none"`` only.
        adjacency: What a neighbouring world is.
        require: The most that agents let a run reveal about them.
        books: A durable ledger that pays as well, e.g. for pilot runs too.
        noise: Where noise and secret coins come from. The default is the operating system, so a run
            cannot be repeated; `InsecureSeededNoise(seed)` can, and protects nothing.
        data: What agents have observed before, by name.
        candidates: The only points that can be evaluated, `K x d`.
        initial_design: Public points that every agent evaluates at the start, or its own points by
            name: `own_step.spread_design` makes them. Default those that it is dealt, or with
            `Following` random ones in its own region.

    Example:
        >>> result = run(DPFTSDE(budget=23, epsilon=2.0), SklearnTuning(4), seed=0)
        >>> result.privacy["epsilon"] <= 2.0
        True
    """

    budget: int
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    releases: tuple[int, ...] | Literal["all"] | None = None
    num_regions: int = 1
    exploration: ExplorationSchedule = SoftmaxSchedule()  # noqa: RUF009 - frozen
    sampling: Sampling = PoissonSampling()  # noqa: RUF009 - frozen
    noise_kind: NoiseKind = "correlated"
    message: MessageKind | None = None
    clip_norm: float | None = None
    feature_map: FeatureMap | None = None
    noise_var: float = 0.05
    beta: float = 1.0
    num_initial: int | None = None
    default: Mapping[str, Value] | None = None
    ridge: float = RIDGE
    strategy: TransferSearch | Following = TransferSearch()  # noqa: RUF009 - frozen
    min_reliability: float = MIN_RELIABILITY
    switch_to_local_after: int | None = None
    active: tuple[AgentId, ...] | None = None
    trim: int = 0
    adjacency: Literal["zero-out", "replace-one"] = "zero-out"
    require: Budget | None = None
    books: LedgerFile | None = None
    noise: NoiseSource = field(default_factory=OSNoise)
    data: Mapping[AgentId, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    candidates: Tensor | None = None
    initial_design: Tensor | Mapping[AgentId, Tensor] | None = None

    def __post_init__(self) -> None:
        self._check_budget()
        rounds = self.budget  # at most: with data it depends on who takes part, see `server`
        if not self.data:
            rounds = self.rounds_for(())
            self._check_releases(())
        if self._transfers != (self.message_kind == "own_mean"):
            raise InputDataError(
                f'message="{self.message}" does not go with {type(self.strategy).__name__}: '
                'TransferSearch sends an "own_mean", Following something else. Name both.'
            )
        if self._transfers and self.num_regions > 1:
            raise InputDataError(
                "TransferSearch listens to one release for the whole space: leave out num_regions, "
                "or give strategy=Following()."
            )
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise InputDataError("Give epsilon or noise_multiplier: each follows from the other.")
        has_design = self.initial_design is not None
        check_start(self.default, transfers=self._transfers, has_design=has_design)
        noise = self.epsilon is not None or self.noise_multiplier is not None
        releasing = bool(self._releases_within(rounds))
        if releasing and noise == (self.noise_kind == "none"):
            raise InputDataError(
                "A private run needs epsilon or noise_multiplier. One without privacy (FTS-DE) is "
                'noise_kind="none" and neither.'
            )
        strategy = self.strategy
        random = isinstance(strategy, Following) and strategy.own == "random"
        if random and self.message_kind == "gain" and releasing:
            raise InputDataError('message="gain" needs an own model: own must not be "random".')

    def __getstate__(self) -> dict[str, Any]:
        books = None if self.books is None else _BooksElsewhere()
        return {**self.__dict__, "books": books}

    @property
    def _transfers(self) -> bool:
        return isinstance(self.strategy, TransferSearch)

    @property
    def message_kind(self) -> MessageKind:
        """What agents send."""
        return self.message or ("own_mean" if self._transfers else "gain")

    @property
    def starts(self) -> int:
        """How many points every agent evaluates first."""
        if self.num_initial is not None:
            return self.num_initial
        if not self._transfers:
            return FIRST_POINTS
        return MIN_OWN if self.active is None else int(self.default is not None)

    def initial_for(self, names: tuple[AgentId, ...]) -> int:
        """The points of round 0: the initial design, or what an agent lacks of `starts`."""
        design = self.initial_design
        if design is not None:
            each = design.values() if isinstance(design, Mapping) else (design,)
            return max(map(len, each), default=0)
        if not self._transfers:  # random points of the own region, with or without data
            return self.starts
        counts = {name: len(X) for name, (X, _) in self.data.items()}
        return missing_points(self.starts, names, self.active, counts)

    def _check_releases(self, names: tuple[AgentId, ...]) -> None:
        """Refuse a plan of which nothing is left; an empty one is the user's own."""
        rounds, initial = self.rounds_for(names), self.initial_for(names)
        if self.releases == () or self._releases_within(rounds):
            return
        if not rounds:
            raise no_round(self.budget, initial, "releases=()")
        assert isinstance(self.releases, tuple)
        raise InputDataError(
            f"Nothing would ever be released: releases = {self.releases} come after the last of "
            f"{rounds} rounds. Write releases = (0,), or budget = "
            f"{initial + min(self.releases) + 1} or more. Sites that search alone on purpose have "
            "releases=()."
        )

    def release_rounds(self, names: tuple[AgentId, ...] = ()) -> tuple[int, ...]:
        """After which rounds something is released, if it is worth it."""
        return self._releases_within(self.rounds_for(names))

    def _releases_within(self, rounds: int) -> tuple[int, ...]:
        if self.releases == "all":
            return tuple(range(rounds))
        releases: tuple[int, ...] = RELEASES if self._transfers else FOLLOWED
        if self._transfers and self.active is not None:
            releases = RELEASES[:1]  # who has finished has no more to say later
        releases = releases if self.releases is None else self.releases
        return tuple(t for t in releases if t < rounds)

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> DPFTSDEServer:
        """The server of a study."""
        unknown = sorted(set(self.data) - set(names))
        if unknown:
            raise InputDataError(f"Data of agents that are no agents: {unknown[:8]}.")
        check_designs(self.initial_design, names)
        if self.active is not None and set(self.active) == set(names):
            return replace(self, active=None).server(space, names)
        self._check_releases(names)
        if self.releases != ():
            note_one_site(names)
        partition = Partition.regular(self.num_regions, space.dim)
        delta = default_delta(len(names)) if self.delta is None else self.delta
        releases = self.release_rounds(names)
        z, budget = self.noise_multiplier, None
        if self.epsilon is not None:
            budget = Budget(self.epsilon, delta)
            z = self._noise_for(len(names), len(releases), delta)
        server = DPFTSDEServer(
            setup=self._setup(space, partition, names),
            agents=names,
            rounds=self.rounds_for(names),
            releases=releases,
            exploration=self.exploration,
            noise_multiplier=z,
            noise_kind="none" if z is None else self.noise_kind,
            sampling=self.sampling,
            delta=delta,
            switch_to_local_after=self.switch_to_local_after,
            trim=self.trim,
            ledger=Ledger(adjacency=self.adjacency, budget=budget),
            books=self.books,
            noise=self.noise,
            active=self.active,
        )
        return self._worth_it(server)

    def _worth_it(self, server: DPFTSDEServer) -> DPFTSDEServer:
        """The server; one that releases nothing where nobody would listen, with a warning."""
        outlook = server.outlook
        if outlook is None or outlook.reliability(server.agreement) >= self.min_reliability:
            return server
        alone = replace(server, releases=(), withheld=server.releases)
        warnings.warn(alone.signal_words, SignalWarning, stacklevel=3)
        return alone

    def _noise_for(self, num_agents: int, releases: int, delta: float) -> float:
        assert self.epsilon is not None
        if not isinstance(self.sampling, PoissonSampling):
            raise InputDataError(
                "Samples of a fixed size have no calibration: give a noise_multiplier."
            )
        return noise_multiplier_for(
            epsilon=self.epsilon,
            delta=delta,
            sampling_rate=self.sampling.rate,
            num_releases=max(releases, 1),
            adjacency=self.adjacency,
        )

    def _setup(self, space: SearchSpace, partition: Partition, names: tuple[AgentId, ...]) -> Setup:
        phi = self.feature_map
        if phi is None:
            phi = default_private_features(space)
            if self._transfers:
                phi = WarpedFeatures.around(phi, space.log_offsets)
        if phi.input_dim != space.dim:
            raise InputDataError(
                f"The feature map has {phi.input_dim} inputs, the search space {space.dim} columns."
            )
        kind, count = self.message_kind, self.starts
        norm = self.clip_norm
        if norm is None:
            norm = suggested_clip_norm(phi, kind, count, noise_var=self.noise_var, beta=self.beta)
        return Setup(
            space=space,
            features=phi.to_tensors(),
            noise_var=self.noise_var,
            message=kind,
            beta=self.beta,
            clip_norm=norm,
            partition=partition,
            regions=dict(zip(names, partition.assign(len(names)), strict=True)),
            num_initial=count,
            ridge=self.ridge,
            promise=None,
            min_reliability=self.min_reliability,
            default=default_point(space, self.default),
        )

    def alone(self) -> DPFTSDE:
        """The baseline of comparisons: the same agents without messages, noise or payments."""
        return replace(
            self,
            strategy=TransferSearch(listen=False),
            message=None,
            num_regions=1,
            releases=(),
            noise_kind="none",
            epsilon=None,
            noise_multiplier=None,
            require=None,
            books=None,
        )

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        """Who sees what."""
        sees: Sees = quiet_server(self, space, names).sees
        return sees

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        """What a run costs in privacy; None without noise."""
        price: Price | None = quiet_server(self, space, names).price
        return price

    def agent(self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs) -> DPFTSDEAgent:
        """An agent of a study."""
        return DPFTSDEAgent(
            name=name,
            space=space,
            seed=seed,
            strategy=self.strategy,
            require=self.require,
            data=self.data.get(name),
            candidates=self.candidates,
            initial_design=design_of(self.initial_design, name),
            blobs=blobs,
        )


def default_private_features(
    space: SearchSpace, *, num_features: int = NUM_FEATURES, lengthscale: float | None = None
) -> FeatureMap:
    """A small public basis: every feature costs noise.

    The leading eigenfunctions of a smooth public kernel on `reference_points`, on the scale that is
    searched on.

    Args:
        space: The search space.
        num_features: Its size `M`.
        lengthscale: Of the kernel, in the unit cube; the default grows with the dimension.
    """
    if lengthscale is None:
        lengthscale = LENGTHSCALE * (space.dim / 2) ** 0.5
    kernel = StationaryKernel(math.inf, [lengthscale] * space.dim)
    base: FeatureMap
    if space.dim <= 3:
        base = QuadratureFourierFeatures.from_kernel(kernel, space.bounds, tol=1e-3)
    else:
        base = RandomFourierFeatures.draw(kernel, 1024, generator=generator(0, "private features"))
    count = min(num_features, base.num_features)
    return KLFeatures.from_map(base, reference_points(space.dim), num_features=count)


def suggested_clip_norm(
    feature_map: FeatureMap,
    message: MessageKind,
    num_observations: int,
    *,
    noise_var: float = 0.05,
    beta: float = 1.0,
    quantile: float = 0.99,
) -> float:
    """A clip norm from public quantities alone: messages of agents drawn from the public prior.

    Args:
        feature_map: The shared basis.
        message: What agents send.
        num_observations: How many observations a simulated agent has, at uniform points.
        noise_var: Noise variance on the public scale.
        beta: Scale of a sample's deviation.
        quantile: The share of simulated messages that are not clipped.
    """
    if message == "own_mean" or message == "gain":
        return 1.0
    stream = generator(0, "clip norm")
    norms = []
    for _ in range(200):
        X = stream.uniform(max(num_observations, 1), feature_map.input_dim)
        truth = stream.normal(feature_map.num_features, 1)
        Y = feature_map(X) @ truth + noise_var**0.5 * stream.normal(len(X), 1)
        weights = weight_message(
            message, feature_map, X, Y, noise_var=noise_var, beta=beta, generator=stream
        )
        norms.append(float(weights.norm()))
    return float(torch.tensor(norms).double().quantile(quantile))


def paper_settings(
    dim: int,
    *,
    rounds: int = 60,
    num_regions: int = 4,
    clip_norm: float = 22.0,
    sampling_rate: float = 0.35,
    noise_multiplier: float | None = 1.0,
    exploration: ExplorationSchedule | None = None,
    num_features: int = 100,
    num_initial: int = 10,
    seed: int = 0,
    **options: Any,
) -> DPFTSDE:
    r"""The settings of [Dai2021]_ for its real tasks; published noise, so labelled everywhere.

    Args:
        dim: Dimension of the unit cube.
        rounds: :math:`T`, after the initial points.
        num_regions: :math:`P`.
        clip_norm: The paper's `S`; a vector is clipped to :math:`S / \sqrt P`.
        sampling_rate: :math:`q`.
        noise_multiplier: :math:`z`; None for FTS-DE.
        exploration: Default the paper's softmax, :math:`T_c = 10`, :math:`T_d = 30`.
        num_features: :math:`M`, cosines with random phases, length scale 0.01.
        num_initial: Points at the start.
        seed: Public, of the features.
        options: Further settings of `DPFTSDE`, or others in the place of the paper's.
    """
    kernel = StationaryKernel(math.inf, [0.01] * dim)
    stream = generator(seed, "paper features")
    settings: dict[str, Any] = {
        "budget": rounds + num_initial,
        "noise_multiplier": noise_multiplier,
        "releases": "all",
        "num_regions": num_regions,
        "exploration": SoftmaxSchedule(15, 10, 30) if exploration is None else exploration,
        "sampling": PoissonSampling(sampling_rate),
        "noise_kind": "none" if noise_multiplier is None else "paper",
        "message": "sample",
        "clip_norm": clip_norm / math.sqrt(num_regions),
        "feature_map": RandomFourierFeatures.paper_cosine(kernel, num_features, generator=stream),
        "noise_var": 1e-6,
        "num_initial": num_initial,
        "strategy": paper_following(),
    }
    return DPFTSDE(**{**settings, **options})
