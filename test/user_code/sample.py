"""What a first-time user writes; checked by `mypy --strict` and executed, both in the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from botorch.acquisition.logei import qLogNoisyExpectedImprovement  # strictly: not re-exported
from botorch.optim.optimize import optimize_acqf
from torch import Tensor

from botorch_fed.acquisition import Polynomial, ThompsonSampling, maximize, weight_path
from botorch_fed.ax_adapter import AxFederation, RoundOpen
from botorch_fed.errors import BudgetExceeded, MessageError
from botorch_fed.federation.base import Agent, AgentId, Objective, Outbox, Pending, Server
from botorch_fed.federation.disclosure import Price, Row, Sees
from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    InducingFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    Summary,
    WeightPosterior,
    draw_path,
    feature_map_from_tensors,
    summarize,
)
from botorch_fed.privacy import (
    Budget,
    Event,
    GaussianSum,
    Guarantee,
    InsecureSeededNoise,
    Ledger,
    PrefixSum,
    SharedLedger,
    epsilon,
    noise_multiplier_for,
)
from botorch_fed.privacy.audit import AuditReport, audit
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, Study, run
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.store import Blobs
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from botorch_fed.test_functions import SyntheticGPAgents

SPACE = SearchSpace(
    (Parameter.real("lr", 1e-4, 1.0, scale="log"), Parameter.integer("depth", 1, 8)),
    Outcome(centre=0.5, scale=0.2, minimize=True),
)
LIGHT = Strategy(num_raw=32, num_restarts=2, num_features=32, schedule=Polynomial(0.5))


# ------------------------------------------------------------------ a BoTorch loop


def botorch_loop(queries: int) -> float:
    """Own data and the summaries of two others; returns the best value."""
    kernel = StationaryKernel(float("inf"), [0.3, 0.3], 1.0)
    phi: FeatureMap = QuadratureFourierFeatures.from_kernel(kernel, SPACE.bounds, tol=1e-2)
    received: list[Summary] = []
    for site in range(2):
        X = generator(site, "design").uniform(10, 2)
        sent: Tensor = summarize(phi, X, bowl(X), noise_var=0.1).pack()
        received.append(Summary.unpack(sent, basis=phi.fingerprint))
    mean: Tensor = WeightPosterior.from_total(received[0] + received[1]).mean
    first = ThompsonSampling(weight_path(phi, mean))
    point, value = maximize(first, 2, generator=generator(0, "first"), num_raw=32, num_restarts=2)
    best: float = value
    X, Y = point, bowl(point)
    for t in range(queries):
        model = BasisGP(X, Y, feature_map=phi, noise_var=0.01, summaries=received)
        noisy = qLogNoisyExpectedImprovement(model, X_baseline=X)
        candidates, _ = optimize_acqf(noisy, SPACE.bounds, q=2, num_restarts=2, raw_samples=16)
        alone = BasisGP(X, Y, feature_map=phi)
        drawn = ThompsonSampling(draw_path(alone, generator=generator(0, "path", t)))
        another, _ = maximize(drawn, 2, generator=generator(0, t), num_raw=32, num_restarts=2)
        new = torch.cat([candidates, another])
        X, Y = torch.cat([X, new]), torch.cat([Y, bowl(new)])
        best = float(Y.max())
    rebuilt = feature_map_from_tensors(phi.to_tensors())
    assert rebuilt.fingerprint == phi.fingerprint
    maps: list[FeatureMap] = [
        RandomFourierFeatures.draw(kernel, 20, generator=generator(0, "features")),
        InducingFeatures(kernel, generator(0, "support").uniform(5, 2)),
    ]
    assert [phi.num_features for phi in maps] == [20, 5]
    return best


def bowl(X: Tensor) -> Tensor:
    """`n x d` points to `n x 1` values."""
    return 1.0 - (X - 0.3).square().sum(dim=-1, keepdim=True)


# ------------------------------------------------------------------ runs and their results


def loss(shift: float) -> Objective:
    """A site's objective: from `q x d` points of the unit cube to `q x 1` outcomes."""

    def objective(X: Tensor) -> Tensor | Pending:
        values = [
            0.1 * abs(float(point["depth"]) - 4) + abs(float(point["lr"]) - 10.0**-shift)
            for point in SPACE.from_unit(X)
        ]
        return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)

    return objective


def own_objectives(folder: Path) -> RunResult:
    """Three sites, kept on disk, loaded again."""
    objectives: dict[AgentId, Objective] = {name: loss(i + 1) for i, name in enumerate("abc")}
    study = FTS(budget=2, every=1, strategy=LIGHT)
    result: RunResult = run(study, objectives, space=SPACE, seed=0, out=folder, progress=False)
    loaded = RunResult.load(folder)
    X, Y = loaded.history("a")
    best: Tensor = loaded.best("a")
    received: dict[int, int] = loaded.bytes_per_round()
    assert X.shape == (len(Y), SPACE.dim)
    assert len(best) == len(received) - 1 == 2
    points = SPACE.to_unit([{"lr": 0.1, "depth": 3}])
    assert SPACE.snap(points).shape == (1, 2)
    return result


def protocols() -> list[RunResult]:
    """The others, each on the same three functions."""
    problem = SyntheticGPAgents(3, seed=0)
    studies: list[Study] = [
        DPFTSDE(
            budget=4,
            epsilon=20.0,
            delta=1e-2,
            num_initial=2,
            strategy=Following(num_raw=32, num_restarts=2, num_features=32),
            noise=InsecureSeededNoise(0),
        ),
        FedGP(
            budget=3,
            num_initial=2,
            channel="plain",
            search=SupportSearch(support_size=4, num_raw=32, num_restarts=2),
            mechanism=lambda dim, agents: GaussianSum(
                num_agents=agents, dim=dim, clip_norm=100.0, noise_multiplier=0.1, weight=1.0
            ),
            noise_at="server",
            noise=InsecureSeededNoise(0),
        ),
        PrivateUCB(budget=2, epsilon=20.0, noise=InsecureSeededNoise(0)),
    ]
    return [run(study, problem, seed=0, progress=False) for study in studies]


# ------------------------------------------------------------------ privacy


def accounting(folder: Path) -> Guarantee:
    """What releases cost, which noise a budget needs, a ledger in a file, an audit."""
    z: float = noise_multiplier_for(epsilon=2.0, delta=1e-5, sampling_rate=0.5, num_releases=4)
    promise = epsilon(sampling_rate=0.5, noise_multiplier=z, num_releases=4, delta=1e-5)
    ledger = Ledger(budget=Budget(2.0, 1e-5)).spend(Event(z, sampling_rate=0.5), count=4)
    refused: bool = False
    try:
        ledger.spend(Event(z), count=400, note="too much")
    except BudgetExceeded:
        refused = True
    assert refused
    with SharedLedger(folder / "ledger", budget=Budget(2.0, 1e-5)) as books:
        spent: int = books.spend(Event(z, sampling_rate=0.5)).releases
    assert spent == 1
    stream = PrefixSum(num_features=4, outcome_bound=2.0, horizon=8, noise_multiplier=z)
    scale: float = stream.moment_scale
    assert scale > 0
    mechanism = GaussianSum(num_agents=4, dim=3, clip_norm=1.0, noise_multiplier=1.0)
    release, after = mechanism.release(
        {0: torch.ones(3, dtype=torch.float64)},
        ledger=Ledger(),
        noise=InsecureSeededNoise(0),
        path=(0,),
    )
    values: Tensor = release.values
    assert values.shape[-1] == 3
    assert after.releases == 1
    report: AuditReport = audit(mechanism, runs=200)
    assert report.passed, str(report)
    return promise


# ------------------------------------------------------------------ an Ax experiment


def ax_experiments(trials: int) -> int:
    """Two clients in one federation; returns how many trials were completed."""
    clients: dict[str, Client] = {}
    for name in ("red", "blue"):
        client = Client(random_seed=0)
        client.configure_experiment(
            parameters=[RangeParameterConfig(name="x", bounds=(0.0, 1.0), parameter_type="float")]
        )
        client.configure_optimization(objective="score")
        clients[name] = client
    federation = AxFederation(FTS(budget=trials, every=1, strategy=LIGHT), clients, seed=0)
    completed = 0
    for _ in range(trials):
        for client in clients.values():
            try:
                proposed = client.get_next_trials(max_trials=1)
            except RoundOpen:
                continue
            for index, parameters in proposed.items():
                client.complete_trial(index, raw_data={"score": -abs(float(parameters["x"]) - 0.3)})
                completed += 1
    assert federation.rounds > 0
    return completed


# ------------------------------------------------------------------ a protocol of one's own


@dataclass(frozen=True)
class Best:
    """The best value that anybody has seen, or that an agent has."""

    value: float | None


@dataclass(frozen=True, eq=False)
class WalkerState:
    """Queries, whether one is due, the best value heard, and own data."""

    t: int
    querying: bool
    heard: float | None
    Y: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Walker:
    """Random points; tells its best value."""

    space: SearchSpace
    seed: int
    blobs: Blobs

    state_type = WalkerState
    accepts = (Best,)
    defers = False

    @property
    def fingerprint(self) -> str:
        return f"{self.space.fingerprint}-{self.seed}"

    def start(self) -> WalkerState:
        return WalkerState(0, False, None, torch.zeros(0, 1, dtype=torch.float64))

    def check(self, state: WalkerState, request: Best, broadcasts: tuple[str, ...]) -> None:
        if broadcasts:
            raise MessageError("Nothing is broadcast here.")

    def receive(
        self, state: WalkerState, request: Best, broadcasts: tuple[str, ...]
    ) -> WalkerState:
        return WalkerState(state.t, True, request.value, state.Y)

    def wants(self, state: WalkerState) -> bool:
        return state.querying

    def left(self, state: WalkerState, pending: int) -> int:
        return int(state.querying and not pending)

    def ask(self, state: WalkerState, pending: Tensor | None = None) -> Tensor | Pending | None:
        if not state.querying:
            return None
        return generator(self.seed, "point", state.t).uniform(1, self.space.dim)

    def tell(
        self, state: WalkerState, X: Tensor, Y: Tensor, sem: Tensor | None = None
    ) -> WalkerState:
        Y = Y[~Y.isnan().flatten()]  # NaN where an evaluation failed
        return WalkerState(state.t + 1, False, state.heard, torch.cat([state.Y, Y]))

    def tell_curve(self, state: WalkerState, X: Tensor, Y: Tensor) -> WalkerState:
        return self.attach(state, X, Y)

    def attach(
        self, state: WalkerState, X: Tensor, Y: Tensor, sem: Tensor | None = None
    ) -> WalkerState:
        return WalkerState(state.t, state.querying, state.heard, torch.cat([state.Y, Y]))

    def reply(self, state: WalkerState) -> tuple[WalkerState, Best]:
        return state, Best(float(state.Y.max()))


@dataclass(frozen=True)
class BoardState:
    """Rounds done, and the best value."""

    t: int
    best: float | None


@dataclass(frozen=True)
class Board:
    """Passes the best value on."""

    agents: tuple[AgentId, ...]
    rounds: int

    state_type = BoardState
    accepts = (Best,)

    @property
    def fingerprint(self) -> str:
        return f"board of {len(self.agents)}"

    def start(self) -> BoardState:
        return BoardState(0, None)

    def outbox(self, state: BoardState) -> Outbox | None:
        if state.t == self.rounds:
            return None
        return Outbox(dict.fromkeys(self.agents, Best(state.best)))

    def check(self, state: BoardState, sender: AgentId, message: Best) -> None:
        if message.value is None:
            raise MessageError("An agent that was asked has a value.")

    def step(self, state: BoardState, inbox: Mapping[AgentId, Best]) -> BoardState:
        values = [message.value for message in inbox.values() if message.value is not None]
        return BoardState(state.t + 1, max(values, default=None))


@dataclass(frozen=True)
class Walk:
    """The study of it."""

    budget: int

    def server(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Server[BoardState]:
        return Board(names, self.budget)

    def agent(
        self, name: AgentId, space: SearchSpace, seed: int, blobs: Blobs
    ) -> Agent[WalkerState]:
        return Walker(space=space, seed=seed, blobs=blobs)

    def sees(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Sees:
        row = Row.of(Best, "agent", "the best value of an agent", ("server",), "data")
        return Sees(rows=(row,), trust="The server is trusted with every agent's best value.")

    def price(self, space: SearchSpace, names: tuple[AgentId, ...]) -> Price | None:
        return None


def own_protocol() -> RunResult:
    """`Walk` is a `Study`, and nothing had to be inherited for it."""
    make: Callable[[int], Study] = Walk
    return run(make(3), {"a": loss(1), "b": loss(2)}, space=SPACE, seed=0, progress=False)


def main() -> None:
    """All of it, small."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    print(f"best value {botorch_loop(1):.3f}")
    print(own_objectives(folder / "run"))
    for result in protocols():
        print(result)
    print(accounting(folder))
    print(ax_experiments(2), "trials")
    print(len(own_protocol().records), "observations of a protocol of one's own")


if __name__ == "__main__":
    main()
