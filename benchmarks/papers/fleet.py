"""All agents of a federation at once, on a public discrete domain.

    result = Fleet(problem, study, starts, seed=0).run()

plays the same rounds as `run(study, problem, seed=0)` does with the problem's points as candidates.
The server is the shipped one: features, mechanism, sampling, noise, ledger, weights of regions;
so are fits, expected gains and their projection. Only what agents compute one by one is computed
for all of them together, so that 200 agents with 40 queries take seconds.

With own expected improvement every query is that of `run`, and with noise from the same seed so is
every release. Own Thompson samples have the same law but other random numbers: their prior draw is
exact on the domain where the kernel is known, and else has at most `NUM_FEATURES` features, drawn
anew with every fit.

As all of this is a simulation, it also tells what nobody may know: how much of a release was
signal. The signal is the release without noise minus what the same protocol releases without data
and noise.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from botorch.acquisition.analytic import _log_ei_helper
from botorch.exceptions.errors import InputDataError
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from botorch_fed.aggregation.noisy import NoisyState, NoisySum, Plan
from botorch_fed.federation.base import AgentId
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import (
    OWN,
    Aggregation,
    Contribution,
    Party,
    Resources,
    Search,
)
from botorch_fed.models import FeatureMap, OwnHyperparameters
from botorch_fed.models.directions import canonical
from botorch_fed.privacy import Ledger, Release, SignalWarning, clip
from botorch_fed.privacy.hazmat.noise import normal
from botorch_fed.rng import Generator, generator
from botorch_fed.search.released import (
    Following,
    ReleaseSearch,
    expected_gain,
    gain_projection,
    regions_of,
)
from botorch_fed.space import SearchSpace
from botorch_fed.studies import DPFTSDE

NUM_FEATURES = 128  # of the prior part of own samples, at most
MIN_VARIANCE = 1e-10  # of a posterior, as in GPyTorch
ROUNDING = 1e-9  # of a norm that fills the bound


class Table(Protocol):
    """A federated problem on a discrete domain, e.g. `Tabulated` or `SyntheticGPAgents`."""

    space: SearchSpace
    points: Tensor
    values: Tensor
    noise_std: float | None


def agent(n: int) -> AgentId:
    return f"agent{n}"


def agent_seed(seed: int, name: AgentId) -> int:
    """The seed that `run` gives to an agent."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")


# ------------------------------------------------------------------ the simulated server


_LOG = "log of releases"  # in the server's cache
Logged = list[tuple[int, dict[int, Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class WatchedSum(NoisySum):
    """Noisy sums, watched: the server's cache has one entry per release.

    Attributes:
        control: All messages count as zero, so that what is followed is noise, or a random vector
            of the clip norm where there is none.
    """

    control: bool = field(default=False, metadata=OWN)

    def _release(
        self, hub: Party, state: NoisyState, given: Mapping[int, Tensor]
    ) -> tuple[Release, Ledger]:
        given = {} if self.control else dict(given)
        release, ledger = super()._release(hub, state, given)
        log_of(hub.resources).append((state.t, dict(given), release.values))
        return release, ledger

    def _plain(self, hub: Party, t: int, given: Mapping[int, Tensor]) -> Tensor:
        values = super()._plain(hub, t, given)
        if self.control:
            values = normal(hub.resources.noise, *values.shape, path=("field", t))
            values *= self.plan(hub.terms).clip_norm / values.norm(dim=-1, keepdim=True)
        log_of(hub.resources).append((t, dict(given), values))
        return values


def log_of(resources: Resources) -> Logged:
    """One entry per release: the round, what arrived and what went out."""
    log: Logged = resources.cache.setdefault(_LOG, [])
    return log


class Watched:
    """What nobody may know about a server of a `WatchedStudy`.

    Args:
        server: The server.
    """

    def __init__(self, server: FederatedServer) -> None:
        aggregation, search = server.terms.aggregation, server.terms.search
        assert isinstance(aggregation, WatchedSum)
        self.server, self.aggregation, self.search = server, aggregation, search
        self.plan: Plan = aggregation.plan(server.hub.terms)
        self.log = log_of(server.resources)

    def contributing(self, state: NoisyState) -> bool:
        """Whether the server asks for messages now."""
        box = self.server.outbox(state)
        return box is not None and any(order.contribute for order in box.messages.values())

    def clean(self, t: int, given: Mapping[int, Tensor]) -> Tensor:
        """The release of round `t` without its noise, for the same sample: `P x M`."""
        noise = self.server.resources.noise
        if noise.private:
            raise InputDataError("A simulation needs seeded noise: who was sampled is a secret.")
        N = len(self.server.terms.agents)
        rows = torch.zeros(N, self.search.size(self.server.terms), dtype=torch.float64)
        for n, vector in given.items():
            rows[n] = clip(vector, self.plan.clip_norm)
        mechanism = self.plan.mechanism(t)
        sampled = self.aggregation.sampling.draw(N, noise=noise, path=("release", t, "sampling"))
        weights: Tensor = mechanism.weights  # type: ignore[attr-defined]
        return weights @ (rows * sampled.double()[:, None]) / mechanism.sampling_rate

    def signal_to_noise(self, seeds: Sequence[int]) -> list[float]:
        """Of every noisy release: norm of the signal over norm of the noise, all regions together.

        Args:
            seeds: The agents' seeds.
        """
        if self.plan.multiplier is None:
            return []
        ratios = []
        for t, given, values in self.log:
            clean = self.clean(t, given)
            nothing = messages_without_data(self.search, seeds, t, values.shape[-1])
            signal = clean - self.clean(t, {n: nothing[n] for n in given})
            ratios.append(float(signal.norm() / (values - clean).norm()))
        return ratios

    def clip_share(self) -> float:
        """The share of messages that were clipped. Of a simulation: never to be released."""
        rows = [vector for _, given, _ in self.log for vector in given.values()]
        if not rows:
            return 0.0
        norms = torch.stack(rows).double().norm(dim=-1)
        return float((norms > self.plan.clip_norm * (1 + ROUNDING)).double().mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedStudy(DPFTSDE):
    """A study whose servers are watched.

    Attributes:
        control: As `WatchedSum.control`.
        servers: The servers that were made, newest last.
    """

    control: bool = False
    servers: list[Watched]

    def make_aggregation(self) -> Aggregation:
        made = super().make_aggregation()
        given = {f.name: getattr(made, f.name) for f in fields(NoisySum)}
        return WatchedSum(**given, control=self.control)

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> FederatedServer:
        made = super().server(space, names)
        self.servers.append(Watched(made))
        return made


def watched(study: DPFTSDE, *, field: bool = False) -> WatchedStudy:
    """A study whose releases can be measured.

    Args:
        study: The study.
        field: As `WatchedSum.control`.
    """
    given = {f.name: getattr(study, f.name) for f in fields(DPFTSDE) if f.init}
    return WatchedStudy(**given, control=field, servers=[])


def messages_without_data(search: Search, seeds: Sequence[int], t: int, size: int) -> Tensor:
    """What agents would send if they had no data, `N x M`: samples of the prior, or zero."""
    if not isinstance(search, ReleaseSearch) or search.messages.kind != "sample":
        return torch.zeros(len(seeds), size, dtype=torch.float64)
    prior = torch.stack([generator(s, "message", t).normal(size) for s in seeds])
    return search.messages.beta * prior


# ------------------------------------------------------------------ own models


class OwnModels:
    """The Gaussian processes of all agents, seen on the domain.

    Args:
        space: The map of inputs and outcomes.
        points: The domain, `K x d`.
        strategy: How agents model their data.
        seeds: The agents' seeds.
        capacity: How many observations an agent will have.
        known: Hyperparameters, where they are known: nothing is fitted.
    """

    def __init__(
        self,
        space: SearchSpace,
        points: Tensor,
        strategy: Following,
        seeds: Sequence[int],
        capacity: int,
        known: OwnHyperparameters | None,
    ) -> None:
        N, d = len(seeds), points.shape[-1]
        self.space, self.points, self.strategy, self.seeds = space, points, strategy, seeds
        self.log_warp = strategy.log_warp(space)
        self.inputs = self._warped(points)
        self.known = known
        self.fits: list[OwnHyperparameters | None] = [known] * N
        self.lengthscale = torch.ones(N, d, dtype=torch.float64)
        self.outputscale, self.noise_var, self.mean = torch.ones(3, N, dtype=torch.float64)
        self.rows = torch.empty(N, capacity, len(points), dtype=torch.float64)
        self.features: Tensor | None = None
        self.tried = torch.zeros(N, 0, dtype=torch.long)
        if known is not None:
            for n in range(N):
                self._adopt(n, known)

    def _warped(self, points: Tensor) -> Tensor:
        return self.log_warp.transform(points)

    def _adopt(self, n: int, fit: OwnHyperparameters) -> None:
        self.fits[n] = fit
        self.lengthscale[n] = fit.lengthscale
        self.outputscale[n], self.noise_var[n], self.mean[n] = (
            fit.outputscale,
            fit.noise_var,
            fit.mean,
        )

    def update(self, tried: Tensor, Y: Tensor) -> None:
        """All data: rows of the domain that were tried `N x n`, public outcomes `N x n`."""
        old, n = self.tried.shape[1], tried.shape[1]
        self.tried, self.Y = tried, Y
        if n == 0:
            return
        changed = [] if self.known is not None else self._refit()
        if n > old:
            self.rows[:, old:n] = self._covariance(slice(None), tried[:, old:], self.inputs)
        for agents in changed:
            part = slice(agents, agents + 1)
            self.rows[part, :n] = self._covariance(part, tried[part], self.inputs)
            self._redraw_features(agents, n)
        K = self._seen.gather(2, tried[:, None].expand(-1, n, -1))
        K = (K + K.mT) / 2 + torch.diag_embed(self.noise_var[:, None].expand(-1, n))
        self.chol = psd_safe_cholesky(K)
        residuals = (Y - self.mean[:, None])[..., None]
        self.alpha = torch.cholesky_solve(residuals, self.chol)

    @property
    def _seen(self) -> Tensor:
        """Covariances of tried points and the domain, `N x n x K`."""
        return self.rows[:, : self.tried.shape[1]]

    def _refit(self) -> list[int]:
        changed = []
        for n, (rows, Y) in enumerate(zip(self.tried, self.Y, strict=True)):
            before = self.fits[n]
            fit = self.strategy.refit(
                self.space,
                self.points[rows],
                Y[:, None],
                before,
                seed=self.seeds[n],
                name=agent(n),
            )
            if fit is not None and fit is not before:
                self._adopt(n, fit)
                changed.append(n)
        return changed

    def _covariance(self, agents: slice, tried: Tensor, inputs: Tensor) -> Tensor:
        """Of `N x n` tried points and `R x d` inputs: `N x n x R`."""
        scale = self.lengthscale[agents][:, None]
        squares = torch.cdist(
            self.inputs[tried] / scale,
            inputs / scale,
            compute_mode="donot_use_mm_for_euclid_dist",
        ).square_()
        return self.outputscale[agents][:, None, None] * squares.mul_(-0.5).exp_()

    def _redraw_features(self, n: int, count: int) -> None:
        if self.strategy.own != "thompson":
            return
        size = min(self.strategy.num_features, NUM_FEATURES)
        if self.features is None:
            N, K = len(self.seeds), len(self.points)
            self.features = torch.empty(N, K, size, dtype=torch.float64)
        stream = generator(self.seeds[n], "features", count)
        frequencies = stream.normal(size // 2, self.points.shape[-1]) / self.lengthscale[n]
        phase = self.inputs @ frequencies.mT
        scale = math.sqrt(2 / size * float(self.outputscale[n]))
        self.features[n] = torch.cat([phase.cos(), phase.sin()], dim=-1) * scale

    # What is asked of them.

    def mean_on_domain(self) -> Tensor:
        """Posterior means, `N x K`."""
        return self.mean[:, None] + (self._seen.mT @ self.alpha).squeeze(-1)

    def best(self) -> Tensor:
        """The largest posterior mean at a tried point, `N x 1`."""
        return self.mean_on_domain().gather(1, self.tried).amax(dim=1, keepdim=True)

    def posterior(self, points: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means and standard deviations at `R x d` points, by default on the domain: `N x R`."""
        rows = self._seen
        if points is not None:
            rows = self._covariance(slice(None), self.tried, self._warped(points))
        mean = self.mean[:, None] + (rows.mT @ self.alpha).squeeze(-1)
        half = torch.linalg.solve_triangular(self.chol, rows, upper=False)
        variance = self.outputscale[:, None] - half.square_().sum(dim=1)
        return mean, variance.clamp_min_(MIN_VARIANCE).sqrt_()

    def log_gain(self) -> Tensor:
        """Logarithm of the expected improvement over the best mean of a tried point, `N x K`."""
        mean, std = self.posterior()
        return std.log() + _log_ei_helper((mean - self.best()) / std)

    def sample(self, stream: Generator) -> Tensor:
        """A function of every agent's posterior, by pathwise conditioning: `N x K`."""
        N, n = self.tried.shape
        if self.known is not None:
            root = self._prior_root()
            prior = stream.normal(N, root.shape[-1]) @ root.mT
        else:
            assert self.features is not None
            weights = stream.normal(N, self.features.shape[-1], 1)
            prior = (self.features @ weights).squeeze(-1)
        noise = self.noise_var.sqrt()[:, None] * stream.normal(N, n)
        residuals = self.Y - self.mean[:, None] - prior.gather(1, self.tried) - noise
        update = torch.cholesky_solve(residuals[..., None], self.chol)
        return self.mean[:, None] + prior + (self._seen.mT @ update).squeeze(-1)

    def _prior_root(self) -> Tensor:
        """A root of the known kernel on the domain."""
        if self.features is None:
            assert self.known is not None
            scaled = self.inputs / self.known.lengthscale
            values, vectors = torch.linalg.eigh(torch.exp(-(torch.cdist(scaled, scaled) ** 2) / 2))
            values, vectors = values.flip(0), vectors.flip(1)
            kept = int((values > 1e-10 * values[0]).sum())
            scale = (self.known.outputscale * values[:kept]).sqrt()
            self.features = canonical(values, vectors, kept) * scale  # on any machine
        return self.features


# ------------------------------------------------------------------ the federation


@dataclass(frozen=True, eq=False)
class FleetResult:
    """What happened.

    Attributes:
        tried: The rows of the domain that agents tried, starts first, `N x (n0 + T)`.
        outcomes: What they observed there, as they measure it.
        true: The same without observation noise.
        optima: The largest noise-free value of every agent.
        num_starts: `n0`.
        releases: What was released, by round, each `P x M`.
        signal_to_noise: Of every noisy release, as measured.
        privacy: As a run's.
        cpu_seconds: Of the whole.
    """

    tried: Tensor
    outcomes: Tensor
    true: Tensor
    optima: Tensor
    num_starts: int
    releases: dict[int, Tensor]
    signal_to_noise: tuple[float, ...]
    privacy: dict[str, Any]
    cpu_seconds: float

    @property
    def best(self) -> Tensor:
        """The best noise-free value so far, after 0, …, T queries: `N x (T + 1)`."""
        return self._so_far(self.true)

    @property
    def best_observed(self) -> Tensor:
        """The best observation so far, `N x (T + 1)`."""
        return self._so_far(self.outcomes)

    def _so_far(self, values: Tensor) -> Tensor:
        return values.cummax(dim=1).values[:, max(self.num_starts - 1, 0) :]

    @property
    def regret(self) -> Tensor:
        """Simple regret, `N x (T + 1)`."""
        return self.optima[:, None] - self.best

    @property
    def cumulative_regret(self) -> Tensor:
        """Sums of the regrets of queries, starts not counted: `N x (T + 1)`."""
        gaps = self.optima[:, None] - self.true[:, self.num_starts :]
        return torch.cat([torch.zeros_like(gaps[:, :1]), gaps.cumsum(dim=1)], dim=1)


class Fleet:
    """A federation on a discrete domain.

    Args:
        problem: The agents' values on the domain.
        study: The settings. `data`, `candidates`, `num_initial` and `initial_design` are not used:
            starts are given here.
        starts: Rows of the domain that agents have tried before, `N x n0`.
        seed: Of agents, observation noise and samples, as `run`'s.
        field: The control: messages count as zero, and what agents follow is noise.
        design: Rows of the domain that all agents try in their first queries.
        known: The hyperparameters of all agents' functions, where they are known.
    """

    def __init__(
        self,
        problem: Table,
        study: DPFTSDE,
        starts: Tensor,
        *,
        seed: int,
        field: bool = False,
        design: Sequence[int] = (),
        known: OwnHyperparameters | None = None,
    ) -> None:
        N, K = problem.values.shape
        if starts.dim() != 2 or len(starts) != N:
            raise InputDataError(f"starts must be `{N} x n0`, got shape {tuple(starts.shape)}.")
        if starts.numel() and not (0 <= int(starts.min()) and int(starts.max()) < K):
            raise InputDataError(f"starts are rows 0..{K - 1} of the domain.")
        self.problem, self.study, self.starts, self.seed = problem, study, starts, seed
        self.design = tuple(design)
        self.names = tuple(agent(n) for n in range(N))
        self.seeds = [agent_seed(seed, name) for name in self.names]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SignalWarning)  # the result says it
            self.server = watched(study, field=field).server(problem.space, self.names)
        self.watched, self.search = Watched(self.server), self.server.terms.search
        assert isinstance(self.search, ReleaseSearch)
        self.messages, self.plan = self.search.messages, self.watched.plan
        self.feature_map: FeatureMap = self.server.feature_map
        self.Phi = self.feature_map(problem.points)
        self.strategy = study.strategy
        self.own = OwnModels(
            problem.space,
            problem.points,
            self.strategy,
            self.seeds,
            starts.shape[1] + self.plan.rounds,
            known,
        )
        partition = regions_of(self.search.num_regions, problem.space.dim)
        self.regions = partition.region_of(problem.points)
        self.tried = starts
        self.outcomes = self._observe(starts, None)

    def data(self) -> dict[AgentId, tuple[Tensor, Tensor]]:
        """The starts as `DPFTSDE.data`, so that `run` can begin with the same."""
        n0 = self.starts.shape[1]
        points = self.problem.points
        return {
            name: (points[rows], Y[:n0, None])
            for name, rows, Y in zip(self.names, self.starts, self.outcomes, strict=True)
        }

    def run(self) -> FleetResult:
        """Play all rounds."""
        began = time.process_time()
        state = self.server.start()
        releases: dict[int, Tensor] = {}
        self._update()
        for t in range(self.plan.rounds + 1):
            if t > 0:
                self._query(t, self._released(state))
            inbox = {}
            if self.watched.contributing(state) and self.tried.shape[1]:
                messages = self._messages(t)
                pairs = zip(self.names, messages, strict=True)
                inbox = {name: Contribution(row) for name, row in pairs}
            state = self.server.step(state, inbox)
            if state.released is not None and state.released.made == t:
                releases[t] = state.released.values
        return FleetResult(
            tried=self.tried,
            outcomes=self.outcomes,
            true=self.problem.values.gather(1, self.tried),
            optima=self.problem.values.amax(dim=1),
            num_starts=self.starts.shape[1],
            releases=releases,
            signal_to_noise=tuple(self.watched.signal_to_noise(self.seeds)),
            privacy=self.server.privacy(state),
            cpu_seconds=time.process_time() - began,
        )

    # -------------------------------------------------------------- a round

    def _update(self) -> None:
        self.own.update(self.tried, self.problem.space.outcome.to_public(self.outcomes))

    def _observe(self, rows: Tensor, call: int | None) -> Tensor:
        """Observations at `N x q` rows of the domain; None for the starts."""
        Y = self.problem.values.gather(1, rows)
        if self.problem.noise_std and rows.numel():
            path = ("noise of starts",) if call is None else ("noise",)
            calls = () if call is None else (call,)
            noise = [
                generator(self.seed, *path, n, *calls).normal(rows.shape[1])
                for n in range(len(rows))
            ]
            Y = Y + self.problem.noise_std * torch.stack(noise)
        return Y

    def _released(self, state: NoisyState) -> Tensor | None:
        """The release that agents listen to in this round, `P x M`."""
        told = self.server.terms.aggregation.broadcasts(self.server.hub, state)
        return told[0].values if told else None

    def _query(self, t: int, released: Tensor | None) -> None:
        if t <= len(self.design):
            rows = torch.full((len(self.names),), self.design[t - 1])
        else:
            rows = self._choose(t, released)
        Y = self._observe(rows[:, None], t - 1)
        self.tried = torch.cat([self.tried, rows[:, None]], dim=1)
        self.outcomes = torch.cat([self.outcomes, Y], dim=1)
        self._update()

    def _choose(self, t: int, released: Tensor | None) -> Tensor:
        """The rows of the domain that agents try, an `N` tensor."""
        follow = self._followers(t, released)
        rows = torch.zeros(len(self.names), dtype=torch.long)
        if bool(follow.any()):
            assert released is not None
            values = (self.Phi * released[self.regions]).sum(dim=-1)
            spread = self.strategy.spread if t <= self.strategy.follow else 0.0
            rows = self._argmax(values.expand(len(self.names), -1), spread)
        if not bool(follow.all()):
            rows = torch.where(follow, rows, self._own_step(t))
        return rows

    def _followers(self, t: int, released: Tensor | None) -> Tensor:
        """Who follows the release in query `t`."""
        N, p = len(self.names), self.strategy.schedule(t)
        if released is None:
            return torch.zeros(N, dtype=torch.bool)
        if t <= self.strategy.follow:
            return torch.ones(N, dtype=torch.bool)
        if p >= 1:
            return torch.zeros(N, dtype=torch.bool)
        coins = [float(generator(s, "coin", t).uniform(1)) for s in self.seeds]
        return torch.tensor(coins, dtype=torch.float64) >= p

    def _own_step(self, t: int) -> Tensor:
        if self.strategy.own == "random" or not self.tried.shape[1]:
            return self._random(t)
        if self.strategy.own == "ei":
            return self._argmax(self.own.log_gain())
        return self._argmax(self.own.sample(generator(self.seed, "own sample", t)))

    def _random(self, t: int) -> Tensor:
        rows = []
        for allowed, seed in zip(self._worth_a_look(0.0), self.seeds, strict=True):
            pool = allowed.nonzero().flatten()
            rows.append(pool[int(generator(seed, "point", t).uniform(1) * len(pool))])
        return torch.stack(rows)

    def _argmax(self, values: Tensor, spread: float = 0.0) -> Tensor:
        return values.masked_fill(~self._worth_a_look(spread), -math.inf).argmax(dim=1)

    def _worth_a_look(self, spread: float) -> Tensor:
        """Points not tried before, and `spread` away from earlier queries: `N x K` of bool."""
        N, K = self.problem.values.shape
        allowed = torch.ones(N, K, dtype=torch.bool)
        if self.strategy.min_distance == 0:
            return allowed
        fresh = allowed.scatter(1, self.tried, False)
        fresh |= ~fresh.any(dim=1, keepdim=True)
        queried = self.tried[:, self.starts.shape[1] :]
        if spread == 0 or not queried.shape[1]:
            return fresh
        inputs = self.own.inputs
        far = fresh & (torch.cdist(inputs.expand(N, -1, -1), inputs[queried]).amin(-1) >= spread)
        return torch.where(far.any(dim=1, keepdim=True), far, fresh)

    # -------------------------------------------------------------- messages

    def _messages(self, t: int) -> Tensor:
        """What agents send after `t` queries, `N x M`."""
        if self.messages.kind == "gain":
            return self._gains()
        return self._weights(t)

    def _gains(self) -> Tensor:
        """`gain_message` of all agents."""
        reference, projection = gain_projection(self.feature_map, self.messages.ridge)
        mean, std = self.own.posterior(reference)
        weights = expected_gain(mean, std, self.own.best()) @ projection.mT
        norms = weights.norm(dim=-1, keepdim=True)
        scale = self.plan.clip_norm / torch.where(norms > 0, norms, torch.ones_like(norms))
        return weights * scale

    def _weights(self, t: int) -> Tensor:
        """`ReleaseMessage.make` of all agents, in the dual form."""
        message = self.messages
        Phi = self.Phi[self.tried]  # N x n x M
        n, M = Phi.shape[1:]
        Y = self.problem.space.outcome.to_public(self.outcomes)
        chol = torch.linalg.cholesky(Phi @ Phi.mT + message.noise_var * torch.eye(n).double())

        def pulled(targets: Tensor) -> Tensor:
            solved = torch.cholesky_solve(targets[..., None], chol)
            return (Phi.mT @ solved).squeeze(-1)

        mean = pulled(Y)
        if message.kind == "mean":
            return mean
        streams = [generator(s, "message", t) for s in self.seeds]
        prior = torch.stack([stream.normal(M) for stream in streams])
        noise = math.sqrt(message.noise_var) * torch.stack([stream.normal(n) for stream in streams])
        away = pulled((Phi @ prior[..., None]).squeeze(-1) + noise)
        return mean + message.beta * (prior - away)
