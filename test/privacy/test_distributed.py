"""Noise that agents add themselves: its law, its bounds, its price, and defects that are found."""

from __future__ import annotations

import itertools
import math
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from scipy.stats import chi2
from torch import Tensor

from benchmarks.privacy_mutants import (
    DISTRIBUTED_CASES,
    DISTRIBUTED_MUTANTS,
    Mutant,
    audited_distributed,
    installed,
)
from botorch_fed.errors import BudgetExceeded
from botorch_fed.models import Summary, summarize
from botorch_fed.privacy.accounting import Budget, Event, Ledger, compose
from botorch_fed.privacy.distributed import (
    LEAST_STD,
    DistributedGaussianSum,
    DistributedRecordSum,
    noise_multiplier_within,
)
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat import noise as hazmat
from botorch_fed.privacy.hazmat.noise import (
    InsecureSeededNoise,
    OSNoise,
    Path,
    discrete_gaussian,
    discrete_gaussian_reach,
)
from botorch_fed.privacy.mechanisms import SignalWarning
from botorch_fed.privacy.shared_ledger import SharedLedger
from botorch_fed.rng import generator
from test.cases import inducing, normal, uniform

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
SEEDED = InsecureSeededNoise(3)
LEVEL = 1e-6  # probability that a healthy law fails one of the tests of it


def agents(**changes: Any) -> DistributedGaussianSum:
    settings: dict[str, Any] = {
        "dim": 5,
        "num_agents": 10,
        "clip_norm": 2.0,
        "noise_multiplier": 1.5,
        "colluding": 3,
        "dropping": 2,
    }
    return DistributedGaussianSum(**{**settings, **changes})


def records(**changes: Any) -> DistributedRecordSum:
    settings: dict[str, Any] = {
        "num_features": 4,
        "outcome_bound": 0.7,
        "max_records": 60,
        "num_agents": 10,
        "noise_multiplier": 1.5,
        "colluding": 3,
        "dropping": 2,
    }
    return DistributedRecordSum(**{**settings, **changes})


def mass(std: float, reach: int) -> tuple[np.ndarray, np.ndarray]:
    k = np.arange(-reach, reach + 1)
    p = np.exp(-(k**2) / (2 * std**2))
    return k, p / p.sum()


# ------------------------------------------------------------------ the discrete Gaussian


@pytest.mark.parametrize("std", [0.3, 1.0, 3.3, 8.0, 37.5])
def test_frequencies_are_those_of_the_law(std: float) -> None:
    count = 200_000
    draws = discrete_gaussian(std, count, noise=SEEDED, path=("law", str(std))).numpy()
    k, p = mass(std, discrete_gaussian_reach(std))
    often = p * count > 10
    observed = np.array([(draws == value).sum() for value in k[often]])
    expected = p[often] * count
    rest, expected_rest = count - observed.sum(), count - expected.sum()
    assert rest <= expected_rest + 6 * math.sqrt(expected_rest + 1)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < chi2.isf(LEVEL, often.sum())


@pytest.mark.parametrize("std", [8.0, 1000.7, 2.0**20 * 1.37, 2.0**30, 2.0**45])
def test_moments_from_eight_steps_on_are_the_normals(std: float) -> None:
    count = 100_000
    draws = discrete_gaussian(std, count, noise=SEEDED, path=("moments", str(std)))
    assert draws.dtype == torch.int64
    z = draws.double() / std
    # five standard errors of the mean of z, z^2, z^3 and z^4
    for power, variance, expected in [(1, 1, 0), (2, 2, 1), (3, 15, 0), (4, 96, 3)]:
        slack = 5 * math.sqrt(variance / count)
        assert float(z.pow(power).mean()) == pytest.approx(expected, abs=slack)
    limit = math.sqrt(math.log(2 / LEVEL) / (2 * count))  # Dvoretzky, Kiefer, Wolfowitz, Massart
    steps = torch.arange(1, count + 1) / count
    distance = (torch.special.ndtr(z.sort().values) - steps).abs().max()
    assert float(distance) < limit + 0.2 / std + 1 / count


def test_staircase_is_the_envelope_and_holds_all_but_nothing() -> None:
    std = 100.3
    stairs = hazmat._staircase(std)
    width = 1 << stairs.bits
    assert std / 16 < width <= std / 8
    weights = np.exp(-((np.arange(len(stairs.high)) * width) ** 2) / (2 * std**2))
    levels = np.cumsum(weights) / weights.sum()
    np.testing.assert_allclose(stairs.high / 2.0**52, levels, rtol=0, atol=1e-14)
    assert int(stairs.high[-1]) == 2**52
    assert discrete_gaussian_reach(std) == width * len(weights)
    assert 13.5 * std <= discrete_gaussian_reach(std) <= 13.8 * std


def test_coins_thrown_with_sixty_digits_show_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = discrete_gaussian(50.5, 300, noise=SEEDED, path=("coins",))
    monkeypatch.setattr(hazmat, "_MARGIN", 2.0)
    exact = discrete_gaussian(50.5, 300, noise=SEEDED, path=("coins",))
    assert torch.equal(quick, exact)


@pytest.mark.parametrize(("more", "step"), [(-1, 0), (0, 1), (1, 1)])
def test_lower_bits_decide_at_the_edge_of_a_stair(more: int, step: int) -> None:
    stairs = hazmat._staircase(20.0)

    class Edge:
        private = False

        def uniform(self, *shape: int, path: Path) -> Tensor:
            word = int(stairs.low[3]) + more
            return torch.full(shape, (2 * word + 1) * 2.0**-53, dtype=torch.float64)

    found = stairs._stairs(stairs.high[[3, 5]] - np.array([0, 1]), Edge(), ())
    assert found.tolist() == [3 + step, 5]


def test_words_of_uniform_numbers_are_equally_likely() -> None:
    # All k near the places where (k + 1/2) / 2^53 is rounded, clamped as the sources do.
    top = np.nextafter(1.0, 0.0)

    def words(k: np.ndarray) -> np.ndarray:
        uniforms = np.minimum((k.astype(np.float64) + 0.5) * 2.0**-53, top)
        return hazmat._words(torch.from_numpy(uniforms))

    half, end = 2**52, 2**53
    lower = words(np.arange(half - 64, half))
    upper = words(np.concatenate([np.arange(half, half + 64), np.arange(end - 64, end)]))
    for found, smallest in [(lower, half // 2 - 32), (upper, half // 2)]:
        values, counts = np.unique(found, return_counts=True)
        assert values[0] == smallest
        inside = counts[:-1] if found is lower else counts[np.abs(values - half // 2 - 32) > 1]
        # one pair is cut by the end of the tested range above one half
        assert (np.sort(inside)[1:] == 2).all()
    assert int(words(np.array([0]))[0]) == 0


def test_a_source_that_is_not_random_is_refused() -> None:
    class Constant:
        private = False

        def uniform(self, *shape: int, path: Path) -> Tensor:
            return torch.full(shape, 1 - 2.0**-52, dtype=torch.float64)

    with pytest.raises(InputDataError, match="not random"):
        discrete_gaussian(100.0, 3, noise=Constant(), path=())


@pytest.mark.parametrize("std", [0.0, 0.1, -1.0, math.nan, math.inf, 2.0**46])
def test_refuses_what_it_can_not_draw(std: float) -> None:
    with pytest.raises(InputDataError, match="another grid"):
        discrete_gaussian(std, 3, noise=SEEDED, path=())


def test_draws_replay_by_path_and_system_noise_does_not() -> None:
    first, again, other = (
        discrete_gaussian(30.0, 20, noise=SEEDED, path=(p,)) for p in ("a", "a", "b")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    draws = [discrete_gaussian(1e6, 20, noise=OSNoise(), path=()) for _ in range(2)]
    assert not torch.equal(*draws)
    assert discrete_gaussian(30.0, 0, noise=SEEDED, path=()).shape == (0,)


# ------------------------------------------------------------------ accounting


def test_discrete_noise_is_accounted_for_by_renyi_only() -> None:
    event = Event(2.0, discrete=True)
    guarantee = compose([event, event], delta=1e-5)
    assert guarantee.accountant == "dp-accounting-rdp"
    same = compose([Event(2.0)] * 2, delta=1e-5, accountant="dp-accounting-rdp")
    assert guarantee.epsilon == same.epsilon
    assert guarantee.epsilon > compose([Event(2.0)] * 2, delta=1e-5).epsilon
    for name in ("pld", "gdp", "prv", "rdp"):
        with pytest.raises(UnsupportedError, match="discrete noise"):
            compose([event], delta=1e-5, accountant=name)
    assert compose([event, Event(1.0, 0.1)], delta=1e-5).accountant == "dp-accounting-rdp"
    with pytest.raises(InputDataError, match="everyone take part"):
        Event(1.0, 0.5, discrete=True)
    assert "discrete=True" in repr(event)
    assert "discrete" not in repr(Event(2.0))


def test_discrete_events_survive_on_disk_beside_others(tmp_path: FilePath) -> None:
    with SharedLedger(tmp_path / "ledger") as file:
        file.spend(Event(2.0)).spend(Event(2.0, discrete=True), private=False)
        entries = file.ledger.entries
    assert [entry.event.discrete for entry in entries] == [False, True]
    with SharedLedger(tmp_path / "ledger") as file:
        assert file.ledger.entries == entries


@pytest.mark.parametrize(("parties", "distance"), [(1, 16), (3, 20), (3, 7)])
def test_exact_loss_of_summed_discrete_noise_is_within_the_claim(
    parties: int, distance: int
) -> None:
    _, one = mass(LEAST_STD, 110)
    total = one
    for _ in range(parties - 1):
        total = np.convolve(total, one)
    moved = np.concatenate([np.zeros(distance), total])
    still = np.concatenate([total, np.zeros(distance)])
    z = LEAST_STD * math.sqrt(parties) / distance
    for delta in (1e-6, 1e-3, 0.1):
        claimed = compose([Event(z, discrete=True)], delta=delta).epsilon
        exact = np.maximum(moved - math.exp(claimed) * still, 0).sum()
        assert exact <= delta * (1 + 1e-9)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_a_budget_for_fixed_releases_is_spent_and_not_exceeded(adjacency: Any) -> None:
    budget, releases = Budget(2.0, 1e-5), 7
    z = noise_multiplier_within(budget, num_releases=releases, adjacency=adjacency)
    mechanism = agents(noise_multiplier=z, adjacency=adjacency)
    ledger = Ledger(budget=budget, adjacency=adjacency).spend(mechanism.event, count=releases)
    assert ledger.guarantee().epsilon == pytest.approx(budget.epsilon, rel=2e-3)
    with pytest.raises(BudgetExceeded):
        ledger.spend(mechanism.event)


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e3, 1e200])
def test_contributions_stay_within_the_clip_norm(scale: float) -> None:
    mechanism = agents()
    for t in range(20):
        direction = generator(t, "v").normal(5)
        v = scale * direction
        kept = mechanism.grid.to_values(mechanism.bounded(v))
        assert float(kept.norm()) <= mechanism.norm
        if float(v.norm()) > 2.0:
            assert float(kept.norm()) == pytest.approx(2.0, rel=1e-8)
            torch.testing.assert_close(kept, 2 * direction / direction.norm(), rtol=0, atol=1e-8)


def test_rounding_can_reach_the_norm_and_not_exceed_it() -> None:
    grid = PublicGrid(100, 1000.0, 2, precision=1e-3)
    assert grid.step == 1.0
    mechanism = agents(dim=100, num_agents=2, colluding=1, dropping=0, clip_norm=5.01, grid=grid)
    kept = mechanism.bounded(torch.ones(100).double()).double()  # 0.501 each
    assert float(kept.norm()) == 10.0
    assert 10.0 <= mechanism.norm <= 10.02
    for t in range(200):
        v = generator(t, "rounding").normal(100)
        assert float(mechanism.bounded(v).double().norm()) <= mechanism.norm


def statistic(mechanism: DistributedRecordSum, a: Tensor, y: float) -> Tensor:
    record = torch.cat([a, torch.tensor([y + mechanism.centre]).double()])[None]
    return mechanism.grid.to_values(mechanism.bounded(record))


@pytest.mark.parametrize("r", [0.3, 1.0, 2.0, 5.0])
def test_record_sensitivities_are_never_exceeded_and_attained(r: float) -> None:
    settings = {"num_features": 2, "moment_scale": math.sqrt(r) / 0.7, "centre": 0.4}
    zero_out, replaced = records(**settings), records(**settings, adjacency="replace-one")
    angles = torch.linspace(0, math.pi, 61).tolist()
    largest = {"zero-out": 0.0, "replace-one": 0.0}
    first = statistic(zero_out, torch.tensor([1.0, 0.0]).double(), 0.7)
    for angle, length, y in itertools.product(angles, (0.6, 1.0, 7.0), (-9.0, -0.7, 0.2)):
        a = length * torch.tensor([math.cos(angle), math.sin(angle)]).double()
        other = statistic(zero_out, a, y)
        largest["zero-out"] = max(largest["zero-out"], float(other.norm()))
        largest["replace-one"] = max(largest["replace-one"], float((other - first).norm()))
    assert 1 - 1e-3 < largest["zero-out"] / math.sqrt(1 + r) <= 1 + 1e-9
    assert largest["zero-out"] <= zero_out.norm
    expected = math.sqrt(2) * (1 + r / 2) if r <= 2 else 2 * math.sqrt(r)
    assert 1 - 2e-3 < largest["replace-one"] / expected <= 1 + 1e-9
    assert largest["replace-one"] <= 2 * replaced.norm


def test_sums_of_records_are_exact_in_any_order() -> None:
    mechanism = records()
    some = mechanism.records(normal(50, 4), normal(50, 1, seed=1))
    whole = mechanism.bounded(some)
    assert torch.equal(mechanism.bounded(some.flip(0)), whole)
    assert torch.equal(mechanism.bounded(some[:17]) + mechanism.bounded(some[17:]), whole)
    assert torch.equal(mechanism.bounded(some[:0]), torch.zeros_like(whole))


def test_statistics_are_those_of_a_summary() -> None:
    phi, Y = inducing(), 0.7 * normal(50, 1, seed=2).tanh()
    X = uniform(50, 2, seed=8)
    mechanism = records(num_features=phi.num_features, centre=0.1, outcome_bound=0.9)
    features = phi(X) / math.sqrt(1.5)
    values = mechanism.grid.to_values(mechanism.bounded(mechanism.records(features, Y)))
    gram, moment = mechanism.gram_and_moment(values, noise_var=0.02, outputscale=1.5)
    expected = summarize(phi, X, Y, noise_var=0.02, mean=0.1, noise="iid")
    slack = 50 * mechanism.grid.step * 1.5 / 0.02  # half a step for each record
    torch.testing.assert_close(gram, expected.gram, rtol=0, atol=slack)
    torch.testing.assert_close(moment, expected.moment, rtol=0, atol=slack)
    packed = Summary(expected.gram * 0.02 / 1.5, expected.moment, expected.basis).pack()
    torch.testing.assert_close(packed[:-12], values[:-12], rtol=0, atol=slack)


def test_noise_of_the_moment_is_stated() -> None:
    mechanism = records()
    draws = [mechanism.share_of_noise(noise=SEEDED, path=(t,)).double() for t in range(10 * 400)]
    sums = torch.stack(draws).reshape(400, 10, -1).sum(dim=1) * mechanism.grid.step
    moments = torch.stack(
        [mechanism.gram_and_moment(s, noise_var=0.05, outputscale=2.0)[1] for s in sums]
    )
    stated = mechanism.moment_noise_std(noise_var=0.05, outputscale=2.0)
    assert float(moments.std()) == pytest.approx(stated, rel=5 / math.sqrt(2 * moments.numel()))


@pytest.mark.parametrize("factor", [0.03, 0.5])
def test_clipping_a_summary_is_tempering_its_likelihood(factor: float) -> None:
    phi, X, Y = inducing(), uniform(9, 2, seed=3), normal(9, 1, seed=4)
    summary = summarize(phi, X, Y, noise_var=0.05)
    v = summary.pack()
    mechanism = agents(dim=len(v), clip_norm=factor * float(v.norm()), noise_multiplier=0.1)
    clipped = Summary.unpack(mechanism.grid.to_values(mechanism.bounded(v)), basis=phi.fingerprint)
    # The same data with every noise block C divided by the factor.
    Phi = phi(X)
    C = (phi.residual(X) + 0.05 * torch.eye(9, dtype=torch.float64)) / factor
    gram, moment = Phi.T @ torch.linalg.solve(C, Phi), Phi.T @ torch.linalg.solve(C, Y)
    torch.testing.assert_close(summary.scaled(factor).gram, gram, rtol=1e-10, atol=1e-10)
    scale = float(v.norm())
    slack = 1e-10 * scale + mechanism.grid.step  # and half a step of the grid
    torch.testing.assert_close(clipped.gram, gram, rtol=0, atol=slack)
    torch.testing.assert_close(clipped.moment, moment, rtol=0, atol=slack)


# ------------------------------------------------------------------ noise


@pytest.mark.parametrize("make", [agents, records])
@pytest.mark.parametrize(("colluding", "dropping"), [(1, 0), (3, 2), (9, 0)])
def test_the_sum_of_shares_has_the_stated_noise(make: Any, colluding: int, dropping: int) -> None:
    mechanism = make(colluding=colluding, dropping=dropping)
    runs, dim = 3000 // mechanism.grid.dim, mechanism.grid.dim
    shares = torch.stack(
        [
            mechanism.share_of_noise(noise=SEEDED, path=(run, f"agent {i}"))
            for run in range(runs)
            for i in range(10)
        ]
    )
    shares = shares.reshape(runs, 10, dim).double() * mechanism.grid.step
    honest = 10 - colluding - dropping
    # about 3000 sums: 7 % is five standard errors; all 30,000 shares: 3 % is seven
    assert float(shares.std()) == pytest.approx(mechanism.agent_std, rel=0.03)
    assert float(shares.sum(dim=1).std()) == pytest.approx(mechanism.noise_std, rel=0.07)
    remaining = float(shares[:, :honest].sum(dim=1).std())
    assert remaining == pytest.approx(mechanism.noise_scale, rel=0.07)
    assert mechanism.agent_std * math.sqrt(honest) >= mechanism.noise_scale * (1 - 1e-15)
    assert mechanism.noise_scale == pytest.approx(1.5 * mechanism.norm, rel=1e-12)
    assert mechanism.noise_std / mechanism.noise_scale == pytest.approx(math.sqrt(10 / honest))


def test_whole_noise_is_that_of_a_trusted_server() -> None:
    mechanism = agents(dim=5000)
    noise = mechanism.whole_noise(noise=SEEDED, path=(1,)).double() * mechanism.grid.step
    assert float(noise.std()) == pytest.approx(mechanism.noise_scale, rel=0.05)


@pytest.mark.parametrize("make", [agents, records])
@pytest.mark.parametrize("z", [0.01, 1.5, 1e4])
def test_grids_of_their_own_leave_room(make: Any, z: float) -> None:
    mechanism = make(noise_multiplier=z)
    units = mechanism.agent_std / mechanism.grid.step
    assert units > 2.0**20
    largest = mechanism._largest / mechanism.grid.step + discrete_gaussian_reach(units)
    assert largest < mechanism.grid.largest
    assert mechanism.norm == pytest.approx(mechanism._norm(0.0), rel=1e-4)


# ------------------------------------------------------------------ refusals


def test_refuses_when_nobody_is_left_to_add_noise() -> None:
    with pytest.raises(InputDataError, match="nobody is left"):
        agents(colluding=7, dropping=3)
    assert agents(num_agents=2, colluding=1, dropping=0).honest == 1


def test_too_coarse_a_grid_is_refused_and_the_one_it_names_is_taken() -> None:
    with pytest.raises(InputDataError, match=r"steps of the grid.*precision=") as caught:
        agents(grid=PublicGrid(5, 64.0, 10, precision=0.02))
    words = str(caught.value).split("bound=")[1].split(" or finer")[0]
    bound, precision = (float(word) for word in words.split(" and precision="))
    mechanism = agents(grid=PublicGrid(5, bound, 10, precision=precision))
    assert mechanism.agent_std >= LEAST_STD * mechanism.grid.step


def test_too_narrow_a_grid_is_refused_and_the_one_it_names_is_taken() -> None:
    with pytest.raises(InputDataError, match="take a grid with bound=") as caught:
        agents(grid=PublicGrid(5, 3.0, 10))
    bound = float(str(caught.value).split("bound=")[1].rstrip("."))
    assert agents(grid=PublicGrid(5, bound, 10)).grid.bound == bound


@pytest.mark.parametrize(
    "changes",
    [
        {"num_agents": 0},
        {"colluding": -1},
        {"dropping": 1.0},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"adjacency": "add-remove"},
        {"grid": PublicGrid(6, 1e3, 10)},
        {"grid": PublicGrid(5, 1e3, 9)},
    ],
    ids=str,
)
def test_refuses_settings_that_do_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        agents(**changes)
    with pytest.raises(InputDataError):
        records(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome_bound": 0.0},
        {"max_records": 0},
        {"num_features": 0},
        {"centre": math.nan},
        {"moment_scale": 0.0},
        {"moment_scale": math.nan},
    ],
    ids=str,
)
def test_refuses_records_without_bounds(changes: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        records(**changes)
    with pytest.raises(InputDataError):
        agents(clip_norm=math.nan)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_refuses_what_is_not_finite(value: float, place: int) -> None:
    v, rows = torch.zeros(5).double(), torch.zeros(3, 5).double()
    v[place], rows[1, place] = value, value
    with pytest.raises(InputDataError, match="finite"):
        agents().bounded(v)
    with pytest.raises(InputDataError, match="finite"):
        records().bounded(rows)


def test_refuses_shapes_and_too_many_records() -> None:
    with pytest.raises(BotorchTensorDimensionError, match=r"\(5,\)"):
        agents().bounded(torch.zeros(6))
    for shape in [(3, 4), (5,), (1, 3, 5)]:
        with pytest.raises(BotorchTensorDimensionError, match="n x 5"):
            records().bounded(torch.zeros(shape))
    with pytest.raises(InputDataError, match="61 records"):
        records().bounded(torch.zeros(61, 5))
    with pytest.raises(BotorchTensorDimensionError, match="n x 4"):
        records().records(torch.zeros(3, 4), torch.zeros(4, 1))
    with pytest.raises(BotorchTensorDimensionError, match=r"\(14,\)"):
        records().gram_and_moment(torch.zeros(13), noise_var=1.0)
    with pytest.raises(InputDataError, match="positive"):
        records().gram_and_moment(torch.zeros(14), noise_var=0.0)


def test_warns_where_the_sum_is_mostly_noise() -> None:
    with pytest.warns(SignalWarning, match="times as much signal"):
        agents(noise_multiplier=50.0)


# ------------------------------------------------------------------ audits

COSTLY = {"no clip", "rounding forgotten", "features not clipped", "outcomes not clipped"}
PAIRS = [(mutant, case) for mutant in DISTRIBUTED_MUTANTS for case in mutant.cases]
FIRST = [(mutant, mutant.cases[0]) for mutant in DISTRIBUTED_MUTANTS]
REST = [pair for pair in PAIRS if pair not in FIRST]


def _named(pairs: list[tuple[Mutant, str]]) -> list[Any]:
    return [pytest.param(mutant, case, id=f"{mutant.name}-{case}") for mutant, case in pairs]


@pytest.mark.parametrize("case", DISTRIBUTED_CASES)
def test_healthy_mechanisms_pass(case: str) -> None:
    report = audited_distributed(case)
    assert report.passed, str(report)
    assert 0 < report.epsilon_lower_bound < report.guarantee.epsilon


@pytest.mark.nightly
@pytest.mark.parametrize("case", DISTRIBUTED_CASES)
def test_healthy_mechanisms_pass_reruns(case: str) -> None:
    reports = [audited_distributed(case, seed=seed) for seed in range(1, 8)]
    assert all(report.passed for report in reports)


@pytest.mark.parametrize(("mutant", "case"), _named(FIRST))
def test_mutants_fail(mutant: Mutant, case: str) -> None:
    with installed(mutant):
        report = audited_distributed(case)
    assert not report.passed, str(report)
    if mutant.name in COSTLY:  # what an adversary sees is enough
        assert any(check.box == "black" for check in report.failures), str(report)


@pytest.mark.nightly
@pytest.mark.parametrize(("mutant", "case"), _named(REST))
def test_mutants_fail_in_every_other_case(mutant: Mutant, case: str) -> None:
    test_mutants_fail(mutant, case)
