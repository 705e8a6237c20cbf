"""Increments of clients and blocks of public actions: their laws, bounds, prices and states."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from benchmarks.papers.published.noise import paper_local_noise
from botorch_fed.errors import BudgetExceeded, MessageError
from botorch_fed.privacy.accounting import Budget, Event, Ledger, gaussian_mu
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise, Path, lattice_step
from botorch_fed.privacy.increments import (
    BlockRelease,
    BlockState,
    BlockSum,
    LocalGaussian,
)
from botorch_fed.privacy.shared_ledger import SharedLedger
from botorch_fed.rng import generator
from botorch_fed.wire.codec import decode, encode
from test.cases import normal

SEEDED = InsecureSeededNoise(3)
SETTINGS = [(0.1, 0.1), (1.0, 0.1), (10.0, 0.1), (0.1, 1e-5), (1.0, 1e-5), (10.0, 1e-5)]


class NoNoise:
    """Noise that is zero."""

    private = False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        return torch.full(shape, 0.5, dtype=torch.float64)


class NoSource:
    """May not be asked."""

    private = False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        raise AssertionError("noise was drawn")


def local(**changes: Any) -> LocalGaussian:
    settings: dict[str, Any] = {
        "num_features": 4,
        "outcome_bound": 0.7,
        "centre": 0.1,
        "noise_multiplier": 1.5,
    }
    return LocalGaussian(**{**settings, **changes})


def blocks(**changes: Any) -> BlockSum:
    settings: dict[str, Any] = {"outcome_bound": 0.7, "centre": 0.1, "noise_multiplier": 1.5}
    return BlockSum(**{**settings, **changes})


def ledger_of(mechanism: LocalGaussian | BlockSum, **changes: Any) -> Ledger:
    return Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit, **changes)


def increment(
    mechanism: LocalGaussian, records: Tensor, noise: Any = SEEDED, t: int | str = 1
) -> Tensor:
    ledger = ledger_of(mechanism)
    release, _ = mechanism.release(records, ledger=ledger, noise=noise, path=(t,))
    return release.values[0]


def started(mechanism: BlockSum, noise: Any = SEEDED) -> BlockState:
    return mechanism.start(ledger=ledger_of(mechanism), noise=noise)[0]


def block(
    mechanism: BlockSum, outcomes: Tensor, noise: Any = SEEDED, path: Path = ("run",)
) -> BlockRelease:
    state = mechanism.open(started(mechanism, noise), len(outcomes))
    _, release = mechanism.add(state, outcomes, noise=noise, path=path)
    assert release is not None
    return release


# ------------------------------------------------------------------ increments


def test_without_noise_an_increment_is_the_statistics_of_clipped_records() -> None:
    mechanism = local()
    features, outcomes = 0.6 * normal(9, 4), normal(9, 1, seed=1)
    values = increment(mechanism, mechanism.records(features, outcomes), NoNoise())
    a = features / features.norm(dim=1, keepdim=True).clamp(min=1.0)
    y = (outcomes - 0.1).clamp(-0.7, 0.7)
    gram, moment = mechanism.gram_and_moment(values, noise_var=0.5, outputscale=2.0)
    slack = 9 * lattice_step(mechanism.noise_scale) * 2.0 / 0.5  # half a step for each record
    torch.testing.assert_close(gram, 4.0 * a.T @ a, rtol=0, atol=slack)
    torch.testing.assert_close(moment, math.sqrt(2) / 0.5 * a.T @ y, rtol=0, atol=slack)
    assert mechanism.moment_scale == math.sqrt(2) / 0.7


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("r", [0.3, 2.0, 5.0])
def test_one_record_moves_an_increment_by_what_the_noise_is_scaled_to(
    adjacency: Any, r: float
) -> None:
    mechanism = local(num_features=2, adjacency=adjacency, moment_scale=math.sqrt(r) / 0.7)
    bound = mechanism.noise_scale / mechanism.noise_multiplier
    bound *= 2 if adjacency == "replace-one" else 1
    rest = torch.cat([normal(5, 2), normal(5, 1, seed=1)], dim=1)

    def with_record(angle: float, length: float, y: float) -> Tensor:
        one = torch.tensor([[length * math.cos(angle), length * math.sin(angle), y + 0.1]]).double()
        return increment(mechanism, torch.cat([rest, one]), NoNoise())

    first, without = with_record(0.0, 1.0, 0.7), increment(mechanism, rest, NoNoise())
    angles = torch.linspace(0, math.pi, 61).tolist()
    largest = 0.0
    for angle, length, y in itertools.product(angles, (0.6, 7.0), (-9.0, 0.2)):
        other = with_record(angle, length, y)
        reference = first if adjacency == "replace-one" else without
        largest = max(largest, float((other - reference).norm()))
    assert 1 - 2e-3 < largest / bound <= 1


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_noise_of_an_increment_and_of_a_sum_is_the_stated_one(adjacency: Any) -> None:
    mechanism, count = local(adjacency=adjacency), 2000
    empty = torch.zeros(0, 5)
    draws = torch.stack([increment(mechanism, empty, t=t) for t in range(count)])
    # 28,000 draws: five standard errors; sums of eight: five again
    slack = 5 / math.sqrt(2 * draws.numel())
    assert float(draws.square().mean().sqrt()) == pytest.approx(mechanism.noise_std(), rel=slack)
    sums = draws.reshape(count // 8, 8, -1).sum(dim=1)
    stated, slack = mechanism.noise_std(8), 5 / math.sqrt(2 * sums.numel())
    assert float(sums.square().mean().sqrt()) == pytest.approx(stated, rel=slack)
    assert stated == pytest.approx(math.sqrt(8) * mechanism.noise_scale)
    assert float(torch.corrcoef(draws.T).fill_diagonal_(0.0).abs().max()) < 5 / math.sqrt(count)


@pytest.mark.parametrize(
    ("setting", "needed"),
    list(zip(SETTINGS, [6.039, 2.303, 0.598, 65.23, 7.914, 1.060], strict=True)),
)
def test_joint_noise_needed_for_rewards_up_to_one(
    setting: tuple[float, float], needed: float
) -> None:
    # kappa = 1: 3 / sqrt(2) over mu
    z = 2 / gaussian_mu(*setting)
    mechanism = local(outcome_bound=1.0, moment_scale=1.0, noise_multiplier=z)
    assert mechanism.noise_scale == pytest.approx(needed, rel=1e-3)
    _, ledger = mechanism.release(
        torch.zeros(1, 5), ledger=ledger_of(mechanism), noise=SEEDED, path=(1,)
    )
    assert ledger.guarantee(delta=setting[1]).epsilon == pytest.approx(setting[0], rel=1e-3)


@pytest.mark.parametrize(
    ("setting", "matrix", "vector"),
    list(
        zip(
            SETTINGS,
            [6.39, 1.76, 0.76, 1.15, 0.96, 0.77],
            [4.98, 1.38, 0.59, 0.83, 0.70, 0.56],
            strict=True,
        )
    ),
)
def test_published_constants_against_what_their_claim_needs(
    setting: tuple[float, float], matrix: float, vector: float
) -> None:
    alpha, beta = setting
    sigma_x, sigma_u = paper_local_noise(alpha, beta, 1.0)
    mu = gaussian_mu(alpha / 2, beta / 2)
    assert sigma_x * mu / math.sqrt(2) == pytest.approx(matrix, abs=0.005)
    assert sigma_u * mu / 2 == pytest.approx(vector, abs=0.005)
    assert paper_local_noise(alpha, beta, 20.0) == pytest.approx((sigma_x, 20 * sigma_u))


def test_published_constants_do_not_keep_the_joint_guarantee_at_ten() -> None:
    sigma_x, sigma_u = paper_local_noise(10.0, 0.1, 1.0)
    # (e_1, 1) to (a', -1) with a'_1 = c, off-diagonal entries with the noise of the upper triangle
    c = torch.linspace(0, 1, 1001).double()
    matrix = (2 * (1 - c**2) ** 2 + c**2 * (1 - c**2)) / sigma_x**2
    mu = float((matrix + 2 * (1 + c) / sigma_u**2).max().sqrt())
    assert mu > 1.05 * gaussian_mu(10.0, 0.1)
    assert Ledger().spend(Event(1 / mu)).guarantee(delta=0.1).epsilon > 11


def test_increments_pay_before_anything_and_say_whether_they_are_private() -> None:
    mechanism, records = local(), torch.zeros(1, 5)
    with pytest.raises(BudgetExceeded):
        mechanism.release(
            records,
            ledger=ledger_of(mechanism, budget=Budget(1e-3, 1e-5)),
            noise=NoSource(),
            path=(1,),
        )
    before = ledger_of(mechanism)
    release, ledger = mechanism.release(records, ledger=before, noise=SEEDED, path=(1,))
    assert not release.private
    assert before.releases == 0
    assert [entry.event for entry in ledger.entries] == [Event(1.5)]
    release, ledger = mechanism.release(records, ledger=ledger, noise=OSNoise(), path=(1,))
    assert release.private
    assert ledger.releases == 2
    assert release.values.shape == (1, 14)
    assert release.noise_std.tolist() == [mechanism.noise_scale]


def test_increments_replay_by_path_and_lie_on_the_lattice() -> None:
    mechanism, records = local(), torch.cat([normal(3, 4), normal(3, 1)], dim=1)
    first, again, other = (increment(mechanism, records, t=t) for t in (1, 1, 2))
    assert torch.equal(first, again)
    assert bool((first != other).all())
    cells = first / lattice_step(mechanism.noise_scale)
    assert torch.equal(cells, cells.round())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_increments_refuse_what_is_not_finite_before_paying(value: float, place: int) -> None:
    mechanism, records = local(), torch.zeros(2, 5)
    records[1, place] = value
    ledger = ledger_of(mechanism, budget=Budget(1e-3, 1e-5))  # would refuse to pay
    with pytest.raises(InputDataError, match="finite"):
        mechanism.release(records, ledger=ledger, noise=NoSource(), path=(1,))


def test_increments_refuse_shapes_ledgers_paths_and_too_many_records() -> None:
    mechanism = local()
    for shape in [(3, 4), (5,), (1, 3, 5)]:
        with pytest.raises(BotorchTensorDimensionError, match="n x 5"):
            increment(mechanism, torch.zeros(shape))
    with pytest.raises(InputDataError, match="give both the same"):
        mechanism.release(torch.zeros(1, 5), ledger=Ledger(), noise=NoSource(), path=(1,))
    path: Any = (1.5,)
    with pytest.raises(InputDataError, match="tuple of int and str"):
        mechanism.release(
            torch.zeros(1, 5), ledger=ledger_of(mechanism), noise=NoSource(), path=path
        )
    with pytest.raises(InputDataError, match="exceeds the lattice"):
        increment(local(noise_multiplier=1e-6), torch.zeros(10_000, 5))
    with pytest.raises(InputDataError, match="one by one"):
        increment(local(unit="agent"), torch.zeros(2, 5))
    assert increment(local(unit="agent"), torch.zeros(1, 5)).shape == (14,)
    with pytest.raises(InputDataError, match="number of increments"):
        mechanism.noise_std(0)


def test_refuses_settings_that_leave_no_room() -> None:
    with pytest.raises(InputDataError, match="room for the lattice"):
        local(noise_multiplier=2.0**20)
    with pytest.raises(InputDataError, match="room for the lattice"):
        blocks(noise_multiplier=2.0**20)
    for alpha, beta, bound in [(0.0, 0.1, 1.0), (1.0, 1.0, 1.0), (1.0, 0.1, math.inf)]:
        with pytest.raises(InputDataError, match="alpha and outcome_bound"):
            paper_local_noise(alpha, beta, bound)


# ------------------------------------------------------------------ blocks


def test_without_noise_a_block_is_the_sum_of_clipped_outcomes() -> None:
    mechanism, outcomes = blocks(), normal(50)
    release = block(mechanism, outcomes, NoNoise())
    expected = float((outcomes - 0.1).clamp(-0.7, 0.7).sum())
    assert release.total == pytest.approx(expected, abs=25 * lattice_step(mechanism.noise_std))
    assert release.mean == pytest.approx(0.1 + expected / 50, abs=1e-5)
    assert (release.index, release.length, release.noise_std) == (0, 50, mechanism.noise_std)
    column = block(mechanism, outcomes[:, None].float(), NoNoise())
    assert column.total == pytest.approx(release.total, abs=1e-5)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_one_outcome_moves_a_block_by_what_the_noise_is_scaled_to(adjacency: Any) -> None:
    mechanism, outcomes = blocks(adjacency=adjacency), normal(6)
    bound = mechanism.noise_std / mechanism.noise_multiplier

    def total(y: float) -> float:
        moved = outcomes.clone()
        moved[3] = y
        return block(mechanism, moved, NoNoise()).total

    far = abs(total(1e9) - total(0.1 if adjacency == "zero-out" else -1e9))
    assert 1 - 1e-5 < far / (bound * (2 if adjacency == "replace-one" else 1)) <= 1


def test_noise_of_blocks_is_the_stated_one_and_independent_between_them() -> None:
    mechanism, count = blocks(), 3000
    state, totals = started(mechanism), []
    for k in range(count):
        state = mechanism.open(state, 1)
        state, release = mechanism.add(state, torch.tensor([0.1]), noise=SEEDED, path=("run",))
        assert release is not None
        assert release.index == k
        totals.append(release.total)
    draws = torch.tensor(totals).double() / mechanism.noise_std
    slack = 5 / math.sqrt(count)  # five standard errors
    assert abs(float(draws.mean())) < slack
    assert float(draws.std()) == pytest.approx(1.0, rel=slack / math.sqrt(2))
    assert abs(float((draws[1:] * draws[:-1]).mean())) < slack


def test_variance_of_a_blocks_mean_is_what_a_model_should_be_told() -> None:
    mechanism, rho, length = blocks(centre=0.0, outcome_bound=5.0), 0.4, 12
    stream = generator(0, "outcomes")
    means = [
        block(mechanism, 1.0 + rho * stream.normal(length), path=(k,)).mean for k in range(2000)
    ]
    stated = block(mechanism, torch.ones(length)).mean_var(rho**2)
    assert stated == pytest.approx(rho**2 / length + mechanism.noise_std**2 / length**2)
    # five standard errors of a variance and of a mean
    values = torch.tensor(means).double()
    assert float(values.var()) == pytest.approx(stated, rel=5 * math.sqrt(2 / 2000))
    assert float(values.mean()) == pytest.approx(1.0, abs=5 * math.sqrt(stated / 2000))


def test_a_run_of_any_length_costs_one_release() -> None:
    z = 2 / gaussian_mu(1.0, 1e-5)
    mechanism = blocks(noise_multiplier=z)
    budget = Budget(1.001, 1e-5)
    state, ledger = mechanism.start(ledger=ledger_of(mechanism, budget=budget), noise=SEEDED)
    assert ledger.releases == 1
    for _ in range(20):
        state = mechanism.open(state, 3)
        state, release = mechanism.add(state, torch.zeros(3), noise=SEEDED, path=("run",))
        assert release is not None
    assert ledger.guarantee().epsilon == pytest.approx(1.0, rel=1e-3)
    assert mechanism.noise_std == pytest.approx(2 * 0.7 / gaussian_mu(1.0, 1e-5), rel=1e-5)
    with pytest.raises(BudgetExceeded):
        mechanism.start(ledger=ledger, noise=NoSource())
    with pytest.raises(InputDataError, match="give both the same"):
        mechanism.start(ledger=Ledger(), noise=NoSource())


def test_a_run_pays_on_disk_before_there_is_a_state(tmp_path: Any) -> None:
    mechanism = blocks()
    with SharedLedger(tmp_path / "ledger", adjacency="replace-one", unit="record") as file:
        _, after = mechanism.start(ledger=file, noise=OSNoise())
        assert after is file
        assert file.releases == 1


def test_an_unfinished_block_shows_nothing_and_draws_no_noise() -> None:
    mechanism = blocks()
    state = mechanism.open(started(mechanism), 5)
    for part in (torch.ones(2), torch.ones(0), torch.ones(2)):
        state, release = mechanism.add(state, part, noise=NoSource(), path=("run",))
        assert release is None
    with pytest.raises(InputDataError, match="unfinished"):
        mechanism.open(state, 3)
    with pytest.raises(InputDataError, match="2 outcomes are more than the 1"):
        mechanism.add(state, torch.ones(2), noise=NoSource(), path=("run",))
    state, release = mechanism.add(state, torch.ones(1), noise=SEEDED, path=("run",))
    assert release is not None
    assert release == block(mechanism, torch.ones(5))  # however they were handed in
    with pytest.raises(InputDataError, match="No block is open"):
        mechanism.add(state, torch.ones(1), noise=NoSource(), path=("run",))
    assert mechanism.open(state, 3).blocks == 2


def test_a_run_resumes_from_bytes_with_the_same_numbers() -> None:
    mechanism, outcomes = blocks(), normal(3, 7)
    plain, resumed = started(mechanism), started(mechanism)
    for row in outcomes:
        plain, resumed = mechanism.open(plain, 7), mechanism.open(resumed, 7)
        for part in row.split([3, 4]):
            resumed = decode(encode(resumed), BlockState)
            plain, first = mechanism.add(plain, part, noise=SEEDED, path=("run",))
            resumed, second = mechanism.add(resumed, part, noise=SEEDED, path=("run",))
            assert resumed == plain
            assert first == second
    assert first is not None
    assert decode(encode(first), BlockRelease) == first


def test_states_of_others_and_broken_ones_are_refused() -> None:
    mechanism = blocks()
    state = mechanism.open(started(mechanism), 4)
    for other in (blocks(noise_multiplier=1.6), blocks(centre=0.0), blocks(adjacency="zero-out")):
        with pytest.raises(InputDataError, match="other settings"):
            other.add(state, torch.ones(1), noise=NoSource(), path=("run",))
        with pytest.raises(InputDataError, match="other settings"):
            other.open(state, 4)
    for changes in ({"count": 4}, {"count": -1}, {"length": 0, "total": 3}, {"blocks": 0}):
        with pytest.raises(InputDataError, match="no state of a block sum"):
            dataclasses.replace(state, **changes)
    bad = encode(state).replace(b"\x01\x04\x00\x00", b"\x01\x04\x04\x00")
    assert bad != encode(state)
    with pytest.raises(MessageError, match="no state of a block sum"):
        decode(bad, BlockState)


def test_a_run_is_private_throughout_or_not_at_all() -> None:
    mechanism = blocks()
    seeded, secret = (mechanism.open(started(mechanism, n), 2) for n in (SEEDED, OSNoise()))
    for state, noise in ((seeded, OSNoise()), (secret, SEEDED)):
        with pytest.raises(InputDataError, match="secret noise or seeded noise throughout"):
            mechanism.add(state, torch.ones(1), noise=noise, path=("run",))
    _, release = mechanism.add(secret, torch.ones(2), noise=OSNoise(), path=("run",))
    assert release is not None
    assert release.private
    assert "seeded" in repr(block(mechanism, torch.ones(2)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_blocks_refuse_what_is_not_finite_and_shapes(value: float) -> None:
    mechanism = blocks()
    state = mechanism.open(started(mechanism), 4)
    with pytest.raises(InputDataError, match="finite"):
        mechanism.add(state, torch.tensor([1.0, value]), noise=NoSource(), path=("run",))
    for shape in [(2, 2), (), (1, 2, 1)]:
        with pytest.raises(BotorchTensorDimensionError, match="n x 1"):
            mechanism.add(state, torch.zeros(shape), noise=NoSource(), path=("run",))
    for length in (0, -1, 2.0, True):
        with pytest.raises(InputDataError, match="length of a block"):
            mechanism.open(started(mechanism), length)  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="exceeds the lattice"):
        mechanism.open(started(mechanism), 2**40)


def test_length_is_that_of_the_rule() -> None:
    mechanism, most = blocks(), 500
    s = mechanism.noise_std
    for sd, rho, c in itertools.product((1e-3, 0.01, 0.1, 1.0, 30.0), (0.0, 0.1, 2.0), (0.5, 1.0)):
        expected = math.ceil(max(s / (c * sd), (rho / (c * sd)) ** 2))
        found = mechanism.length(sd, rho, most=most, c=c)
        assert found == max(1, min(most, expected))
    assert mechanism.length(0.0, 0.1, most=most) == most
    assert mechanism.length(1e-300, 1e300, most=most) == most
    assert mechanism.length(1e300, 1.0, most=most) == 1
    for wrong in ((math.nan, 0.1), (-1.0, 0.1), (0.1, math.inf), (math.inf, 0.1)):
        with pytest.raises(InputDataError, match="finite"):
            mechanism.length(*wrong, most=most)
    with pytest.raises(InputDataError, match="longest block"):
        mechanism.length(0.1, 0.1, most=0)


def test_a_narrower_block_clips_to_its_range_and_has_noise_for_it() -> None:
    mechanism, outcomes = blocks(), torch.tensor([-5.0, 0.25, 0.5, 9.0]).double()
    state = mechanism.open(started(mechanism), 4, centre=0.375, outcome_bound=0.25)
    _, release = mechanism.add(state, outcomes, noise=NoNoise(), path=("run",))
    assert release is not None
    assert release.mean == pytest.approx((0.125 + 0.25 + 0.5 + 0.625) / 4, abs=1e-6)
    assert release.noise_std == pytest.approx(1.5 * 0.25, rel=1e-5)
    assert release.noise_std == mechanism.noise_std_within(0.25) >= 1.5 * 0.25
    draws = []
    for k in range(400):
        _, noisy = mechanism.add(state, outcomes, noise=SEEDED, path=(k,))
        assert noisy is not None
        draws.append(noisy.total - release.total)
    # 400 draws: their deviation is within 14 % of the stated one but for one case in 10^4.
    assert float(torch.tensor(draws).std()) == pytest.approx(1.5 * 0.25, rel=0.14)
    assert mechanism.open(started(mechanism), 4).outcome_bound == 0.7
    assert mechanism.length(0.1, 0.0, most=500, outcome_bound=0.07) == math.ceil(
        mechanism.noise_std_within(0.07) / 0.1
    )


@pytest.mark.parametrize(
    "within",
    [
        {"outcome_bound": 0.8},
        {"outcome_bound": 0.0},
        {"outcome_bound": math.nan},
        {"centre": math.inf},
    ],
    ids=str,
)
def test_a_block_has_no_range_beyond_the_public_one(within: dict[str, float]) -> None:
    mechanism = blocks()
    with pytest.raises(InputDataError, match=r"range of a block|centre of a block"):
        mechanism.open(started(mechanism), 4, **within)


# ------------------------------------------------------------------ words


def test_words_state_the_assumptions_and_no_values() -> None:
    assert "adjacency: one reward replaced; actions public" in repr(blocks())
    assert "adjacency: one reward zeroed; actions public" in repr(blocks(adjacency="zero-out"))
    for expected in ("noise_multiplier=1.5", "'replace-one'", "unit='record'", "outcome_bound=0.7"):
        assert expected in repr(local())
    state = dataclasses.replace(blocks().open(started(blocks()), 4), count=2, total=123456)
    assert repr(state) == "BlockState(secret)"
    release = block(blocks(), torch.ones(3))
    assert "actions public" in repr(release)
    assert f"{release.total:.3f}" not in repr(release)
