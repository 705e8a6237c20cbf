"""The vectorised simulator against the shipped protocol, and the domains that it runs on."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from benchmarks.papers.fleet import Fleet, FleetResult, agent, messages_without_data
from benchmarks.papers.published.own_gp import PaperFollowing
from benchmarks.papers.published.settings import paper_following
from benchmarks.papers.tabulated import NUM_SOBOL, Tabulated, domain
from botorch_fed.acquisition import Constant, Polynomial, SoftmaxSchedule
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.terms import Contribution
from botorch_fed.models import LogWarp, OwnHyperparameters
from botorch_fed.privacy import InsecureSeededNoise, OSNoise, PoissonSampling
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.released import Following
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE

AGENTS = 6
ROUNDS = 5
EI = Following(own="ei", follow=2, schedule=Polynomial(0.5))

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")


def table(noise_std: float | None = None) -> Tabulated:
    """Agents that prefer neighbouring places; the first parameter acts by its ratio."""
    space = SearchSpace(
        (Parameter.real("rate", 1e-3, 1.0), Parameter.real("share", 0.0, 1.0)),
        Outcome(centre=0.5, scale=0.3),
    )
    X = torch.quasirandom.SobolEngine(2, scramble=False).draw(160, dtype=torch.float64)
    X[1::2] = LogWarp(space.log_offsets).untransform(X[1::2])
    centres = 0.3 + 0.2 * generator(0, "centres").uniform(AGENTS, 1, 2)
    values = torch.exp(-4 * (X.sqrt() - centres).square().sum(dim=-1))
    problem = Tabulated(space, X, values)
    problem.noise_std = noise_std
    return problem


def starts(count: int = 3) -> torch.Tensor:
    return (generator(0, "starts").uniform(AGENTS, count) * 160).long()


class _Logged(DPFTSDE):
    """A study that keeps what its server releases."""

    def server(self, space: SearchSpace, names: tuple[str, ...]) -> FederatedServer:
        made = super().server(space, names)
        kept: dict[int, torch.Tensor] = {}
        step = made.step

        def logged(state, inbox):  # type: ignore[no-untyped-def]
            after = step(state, inbox)
            if after.released is not None:
                kept[after.released.made] = after.released.values
            return after

        object.__setattr__(made, "step", logged)
        object.__setattr__(self, "kept", kept)
        return made


def both(
    problem: Tabulated, **settings: object
) -> tuple[RunResult, dict[int, torch.Tensor], FleetResult]:
    """The shipped protocol's result and releases, and the simulator's result of the same."""
    options = {"budget": ROUNDS, "num_initial": 0, "noise": InsecureSeededNoise(1), **settings}
    fleet = Fleet(problem, DPFTSDE(**options), starts(), seed=7)
    data = fleet.data()
    study = _Logged(**options, data=data, candidates=problem.points, design_seed=0)
    shipped = run(study, problem, seed=7, progress=False)
    return shipped, study.kept, fleet.run()


PRIVATE = {"epsilon": 4.0, "releases": (0, 1, 3)}
SETTINGS = {
    "no privacy, gain": {"strategy": EI, "noise_kind": "none"},
    "private gain": {**PRIVATE, "strategy": EI},
    "not warped, not followed": {
        "noise_kind": "none",
        "strategy": Following(own="ei", warp=False, follow=0, schedule=Constant(1.0)),
    },
    "tried again": {**PRIVATE, "strategy": Following(own="ei", min_distance=0.0)},
    "mean": {**PRIVATE, "message": "mean", "strategy": EI},
    "stops listening": {
        **PRIVATE,
        "strategy": Following(own="ei", follow=5),
        "releases": (0, 1),
        "switch_to_local_after": 2,
    },
    "regions, correlated, samples of agents and of the prior": {
        "noise_multiplier": 0.2,
        "releases": "all",
        "num_regions": 3,
        "exploration": SoftmaxSchedule(15, 1, 2),
        "sampling": PoissonSampling(0.6),
        "message": "sample",
        "clip_norm": 4.0,
        "strategy": EI,
    },
    "sample": {**PRIVATE, "message": "sample", "strategy": EI, "beta": 0.5},
    "as published": {
        "noise_multiplier": 1.0,
        "noise_kind": "paper",
        "num_regions": 2,
        "releases": "all",
        "message": "sample",
        "clip_norm": 3.0,
        "strategy": PaperFollowing(own="ei", follow=0, schedule=Polynomial(1.0), min_distance=0.0),
    },
    "random": {"releases": (), "strategy": Following(own="random")},
}


BY_DAY = ("mean", "as published", "regions, correlated, samples of agents and of the prior")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in BY_DAY else [pytest.mark.nightly]) for n in SETTINGS],
)
def test_fleet_plays_the_shipped_protocol_point_for_point(name: str) -> None:
    problem = table(noise_std=0.05 if name == "mean" else None)
    shipped, releases, result = both(problem, **SETTINGS[name])
    for n in range(AGENTS):
        X, Y = shipped.history(agent(n))
        assert torch.equal(problem.points[result.tried[n, 3:]], X)
        assert torch.equal(result.outcomes[n, 3:, None], Y)
    assert list(result.releases) == list(releases)
    for t, values in releases.items():
        torch.testing.assert_close(result.releases[t], values, rtol=1e-5, atol=1e-5)
    ours, theirs = result.privacy, shipped.privacy
    assert theirs is not None
    for key in ours.keys() - {"signal_to_noise"}:
        assert ours[key] == theirs[key]


def test_curves() -> None:
    shipped, _, result = both(table(noise_std=0.05), strategy=EI, noise_kind="none")
    assert result.best.shape == result.cumulative_regret.shape == (AGENTS, ROUNDS + 1)
    assert bool((result.best[:, 1:] >= result.best[:, :-1]).all())
    for n in range(AGENTS):
        torch.testing.assert_close(
            result.cumulative_regret[n, 1:], shipped.cumulative_regret(agent(n))
        )
        start = result.true[n, :3].max()
        torch.testing.assert_close(
            result.best[n, 1:], shipped.best(agent(n)).clamp_min(float(start))
        )
    assert bool((result.best_observed[:, 0] == result.outcomes[:, :3].amax(dim=1)).all())


def test_own_samples_have_the_law_of_the_posterior() -> None:
    known = OwnHyperparameters(torch.full((2,), 0.3).double(), 1.0, 0.01, 0.0, 0)
    study = DPFTSDE(budget=11, releases=(), strategy=Following(warp=False))
    for kernel in (known, None):
        fleet = Fleet(table(), study, starts(), seed=0, known=kernel)
        fleet._update()
        mean, std = fleet.own.posterior()
        draws = torch.stack([fleet.own.sample(generator(0, "draw", k)) for k in range(400)])
        z = (draws.mean(dim=0) - mean) / std * 20
        # Points are correlated, hence the wide bounds; features of one draw are few.
        assert float(z.abs().quantile(0.9)) < 3
        ratio = draws.std(dim=0) / std
        assert 0.8 < float(ratio.quantile(0.1))
        assert float(ratio.quantile(0.9)) < 1.25


def test_a_field_follows_noise_alone() -> None:
    options = {"budget": 13, "strategy": EI, "noise": InsecureSeededNoise(3)}
    private = Fleet(table(), DPFTSDE(epsilon=2.0, **options), starts(), seed=0, field=True).run()
    assert private.signal_to_noise == (0.0, 0.0, 0.0)
    assert all(bool(release.any()) for release in private.releases.values())
    public = Fleet(
        table(), DPFTSDE(noise_kind="none", **options), starts(), seed=0, field=True
    ).run()
    assert public.signal_to_noise == ()
    for release in public.releases.values():
        assert float(release.norm()) == pytest.approx(1.0)
    other = DPFTSDE(noise_kind="none", **{**options, "noise": InsecureSeededNoise(4)})
    again = Fleet(table(), other, starts(), seed=0, field=True).run()
    assert not torch.equal(again.releases[0], public.releases[0])


def test_signal_is_measured_against_the_protocol_without_data() -> None:
    options = {"budget": 12, "strategy": EI, "noise": InsecureSeededNoise(3), "releases": (0,)}
    loud = Fleet(table(), DPFTSDE(noise_multiplier=0.01, **options), starts(), seed=0).run()
    quiet = Fleet(table(), DPFTSDE(noise_multiplier=0.1, **options), starts(), seed=0).run()
    (high,), (low,) = loud.signal_to_noise, quiet.signal_to_noise
    assert high == pytest.approx(10 * low, rel=1e-3)


def test_samples_of_the_prior_are_no_signal() -> None:
    study = DPFTSDE(
        budget=11,
        noise_multiplier=0.01,
        message="sample",
        strategy=Following(),
        noise=InsecureSeededNoise(3),
        clip_norm=9,
    )
    fleet = Fleet(table(), study, starts(), seed=0)
    server = fleet.server
    prior = messages_without_data(fleet.search, fleet.seeds, 0, 20)
    inbox = {name: Contribution(row) for name, row in zip(fleet.names, prior, strict=True)}
    server.step(server.start(), inbox)
    assert fleet.watched.signal_to_noise(fleet.seeds) == [0.0]
    assert float(fleet.watched.clean(0, dict(enumerate(prior))).norm()) > 1


def test_a_design_is_queried_first() -> None:
    study = DPFTSDE(budget=14, noise_kind="none", strategy=EI, noise=InsecureSeededNoise(3))
    result = Fleet(table(), study, starts(), seed=0, design=(5, 9)).run()
    assert bool((result.tried[:, 3:5] == torch.tensor([5, 9])).all())


def test_what_is_refused() -> None:
    study = DPFTSDE(budget=11, epsilon=2.0, strategy=EI, noise=OSNoise())
    with pytest.raises(InputDataError, match="seeded noise"):
        Fleet(table(), study, starts(), seed=0).run()
    with pytest.raises(InputDataError, match="6 x n0"):
        Fleet(table(), study, torch.zeros(2, 3).long(), seed=0)
    with pytest.raises(InputDataError, match="rows 0"):
        Fleet(table(), study, torch.full((AGENTS, 1), 160), seed=0)


def test_warped_domain() -> None:
    space = table().space
    plain, warped = domain(space), domain(space, warped=True)
    assert torch.equal(warped[: len(plain)], plain)
    assert len(warped) - len(plain) > NUM_SOBOL // 2
    X = torch.quasirandom.SobolEngine(2, scramble=False).draw(NUM_SOBOL, dtype=torch.float64)
    assert torch.equal(warped[-1:], LogWarp(space.log_offsets).untransform(X)[-1:])
    assert math.isclose(float(warped.min()), 0.0)


def test_paper_strategy_runs() -> None:
    study = DPFTSDE(budget=12, releases=(), strategy=paper_following())
    assert Fleet(table(), study, starts(), seed=0).run().best.shape == (AGENTS, 3)
