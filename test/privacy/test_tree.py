"""Running sums: factors against tables, noise against its law, and streams that stop and go on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from scipy.linalg import sqrtm
from torch import Tensor

from benchmarks.factors import ExactRoot
from benchmarks.papers.published.noise import doubling_noise, paper_prefix_noise
from botorch_fed.errors import BudgetExceeded, MessageError
from botorch_fed.privacy import tree
from botorch_fed.privacy.accounting import Budget, Event, Ledger, noise_multiplier_for
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, NoiseSource, OSNoise, Path, normal
from botorch_fed.privacy.tree import PrefixRelease, PrefixState, PrefixSum
from botorch_fed.wire.codec import decode, encode
from test.cases import normal as data

NAMES = ("sqrt", "tree")
SEEDED = InsecureSeededNoise(5)


class Counting:
    """Noise that counts how many numbers were drawn."""

    private = True

    def __init__(self) -> None:
        self.drawn = 0

    def uniform(self, *shape: int, path: Path) -> Tensor:
        self.drawn += math.prod(shape)
        return OSNoise().uniform(*shape, path=path)


class Silent:
    """A source whose every normal number is zero."""

    private = False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        return torch.full(shape, 0.5, dtype=torch.float64)


def prefix_sum(**changes: Any) -> PrefixSum:
    settings: dict[str, Any] = {
        "num_features": 3,
        "outcome_bound": 0.5,
        "centre": 0.5,
        "horizon": 20,
        "noise_multiplier": 2.0,
    }
    return PrefixSum(**{**settings, **changes})


def begun(mechanism: PrefixSum, noise: NoiseSource = SEEDED) -> PrefixState:
    ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
    return mechanism.start(ledger=ledger, noise=noise)[0]


def rows(count: int, seed: int, m: int = 3) -> Tensor:
    return torch.cat([data(count, m, seed=seed), 0.5 + data(count, 1, seed=seed + 1)], dim=1)


def stream(
    mechanism: PrefixSum,
    steps: list[Tensor],
    noise: NoiseSource = SEEDED,
    state: PrefixState | None = None,
) -> Iterator[tuple[PrefixState, PrefixRelease]]:
    state = begun(mechanism, noise) if state is None else state
    for records in steps:
        state, release = mechanism.step(state, records, noise=noise, path=("stream",))
        yield state, release


def values(mechanism: PrefixSum, steps: list[Tensor], noise: NoiseSource = SEEDED) -> Tensor:
    return torch.stack([release.values for _, release in stream(mechanism, steps, noise)])


def nothing(count: int, m: int = 3) -> list[Tensor]:
    return [torch.zeros(0, m + 1)] * count


def ones(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.float64).tril()


def factors(name: str, horizon: int) -> PrefixSum:
    if name == "exact root":
        return ExactRoot(num_features=1, outcome_bound=0.5, horizon=horizon, noise_multiplier=2.0)
    return prefix_sum(num_features=1, horizon=horizon, factorization=name)


def ratios(mechanism: PrefixSum) -> np.ndarray:
    """The noise of every prefix over one unit's norm and the multiplier."""
    base = mechanism.noise_multiplier * mechanism.norm
    return np.array([mechanism.noise_std(t) / base for t in range(1, mechanism.horizon + 1)])


# ------------------------------------------------------------------ factorizations


@pytest.mark.parametrize(
    ("name", "horizon", "worst", "rms"),
    [
        ("tree", 64, "6.48", "4.59"),
        ("exact root", 64, "2.39", "2.23"),
        ("sqrt", 64, "2.39", "2.23"),
        ("tree", 1024, "10.49", "7.42"),
        ("exact root", 1024, "3.27", "3.11"),
        ("sqrt", 1024, "3.27", "3.11"),
    ],
)
def test_noise_of_prefixes_is_that_of_the_table(
    name: str, horizon: int, worst: str, rms: str
) -> None:
    found = ratios(factors(name, horizon))
    assert f"{found.max():.2f}" == worst
    assert f"{math.sqrt(np.mean(found**2)):.2f}" == rms


@pytest.mark.parametrize("horizon", [1, 2, 9, 64, 1023])
def test_square_root_is_one(horizon: int) -> None:
    B, C = factors("exact root", horizon).matrices()
    assert torch.equal(torch.triu(C, 1), torch.zeros_like(C))
    torch.testing.assert_close(B @ B, ones(horizon), rtol=0, atol=1e-12)
    torch.testing.assert_close(B, C, rtol=0, atol=0)
    f = C[:, 0]
    k = torch.arange(1, horizon).double()
    torch.testing.assert_close(f[1:], f[:-1] * (1 - 1 / (2 * k)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("horizon", [1, 2, 7, 15, 16, 200])
def test_factors_are_those_of_the_sum(name: str, horizon: int) -> None:
    mechanism = factors(name, horizon)
    B, C = mechanism.matrices()
    torch.testing.assert_close(B @ C, ones(horizon), rtol=0, atol=1e-12)
    scale = mechanism.noise_multiplier * mechanism.norm
    column = float(C.norm(dim=0).max())
    assert mechanism.noise_scale == pytest.approx(scale * column, rel=1e-13)
    np.testing.assert_allclose(ratios(mechanism), column * B.norm(dim=1).numpy(), rtol=1e-12)


def test_a_long_tree_is_a_factor_of_the_sum() -> None:
    mechanism = factors("tree", 1000)
    B, C = mechanism.matrices()
    assert torch.equal(B @ C, ones(1000))
    assert float(C.norm(dim=0).max()) ** 2 == pytest.approx(10)
    assert set(B.unique().tolist()) == {0.0, 1.0}
    assert B.sum(dim=1).tolist() == [t.bit_count() for t in range(1, 1001)]


@pytest.mark.parametrize("horizon", [15, 16, 1000, 1023, 1024])
def test_columns_of_trees(horizon: int) -> None:
    mechanism = factors("tree", horizon)
    square = (mechanism.noise_scale / mechanism.noise_multiplier / mechanism.norm) ** 2
    assert square == pytest.approx(math.floor(math.log2(horizon)) + 1)


@pytest.mark.parametrize(("horizon", "loss"), [(1023, 2e-4), (9999, 2e-3)])
def test_four_buffers_lose_next_to_nothing(horizon: int, loss: float) -> None:
    started = time.process_time()
    tree._fitted.cache_clear()
    omega, theta = tree._fitted(horizon)
    assert time.process_time() - started < 1
    assert tree._fitted(horizon) == (omega, theta)
    mechanism, exact = factors("sqrt", horizon), factors("exact root", horizon)
    worst = mechanism.noise_std(horizon) / mechanism.norm
    assert 1 <= worst / (exact.noise_std(horizon) / exact.norm) <= 1 + loss
    # The published numbers are no better.
    published = {h: (np.array(o), np.array(p)) for h, o, p in tree._KNOWN}[horizon]
    column = 1 + tree._series(*published, horizon - 1)
    row = tree._series(*tree._response(*published), horizon)
    assert worst / 2.0 <= math.sqrt(column * row) * (1 + 1e-9)


@pytest.mark.parametrize("horizon", [9, 17, 100, 1023, 9999])
def test_norms_of_buffered_factors_are_those_of_the_recurrence(horizon: int) -> None:
    factor = tree._named("sqrt", horizon)
    omega, theta = factor.numbers.numpy()
    S, H, b = np.zeros(4), 0.0, []
    for t in range(horizon):
        w = (t == 0) - omega @ S
        S = theta * S + w
        H += w
        b.append(H)
    squares = np.cumsum(np.square(b))
    found = [factor.row_square(t) for t in range(horizon + 1)]
    np.testing.assert_allclose(found, [0, *squares], rtol=1e-9)
    c = np.array([1.0] + [float(omega @ theta**k) for k in range(horizon - 1)])
    assert factor.column_norm == pytest.approx(math.sqrt(np.sum(c**2)), rel=1e-12)
    np.testing.assert_allclose(np.convolve(b, c)[:horizon], 1.0, rtol=1e-9)


@pytest.mark.parametrize("horizon", [9, 10, 13, 20, 33, 50, 80, 300, 2000])
def test_buffers_are_fitted_at_every_horizon(horizon: int) -> None:
    worst = ratios(factors("sqrt", horizon)).max()
    assert 1 - 1e-9 <= worst / ratios(factors("exact root", horizon)).max() <= 1 + 3e-4


# ------------------------------------------------------------------ noise


@pytest.mark.parametrize("name", NAMES)
def test_a_released_number_has_the_stated_noise(name: str) -> None:
    # 5150 numbers: as many independent streams of one number.
    mechanism = prefix_sum(num_features=100, horizon=40, factorization=name)
    for _, release in stream(mechanism, nothing(40, m=100)):
        assert release.noise_std == pytest.approx(mechanism.noise_std(release.t), rel=1e-13)
        root_mean_square = float(release.values.square().mean().sqrt())
        assert root_mean_square == pytest.approx(release.noise_std, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_releases_are_correlated_as_documented(name: str) -> None:
    horizon = 12
    mechanism = prefix_sum(num_features=100, horizon=horizon, factorization=name)
    noise = values(mechanism, nothing(horizon, m=100)).T  # one stream in a row
    scale = mechanism.noise_multiplier * mechanism.norm
    B, C = mechanism.matrices()
    B = scale * C.norm(dim=0).max() * B
    covariance = noise.T @ noise / len(noise)
    L = torch.linalg.cholesky(B @ B.T)
    whitened = torch.linalg.solve_triangular(L, covariance, upper=False)
    whitened = torch.linalg.solve_triangular(L, whitened.T, upper=False)
    # 5150 streams: an entry has a standard error of at most √(2/5150) = 0.020; five of them
    deviation = (whitened - torch.eye(horizon)).abs()
    assert float(deviation.max()) < 0.1
    means = torch.linalg.solve_triangular(L, noise.mean(dim=0)[:, None], upper=False)
    assert float(means.abs().max()) < 5 / math.sqrt(5150)


def test_numbers_of_one_release_are_independent() -> None:
    mechanism = prefix_sum(num_features=4, horizon=600, factorization="tree")
    noise = values(mechanism, nothing(600, m=4))
    steps = torch.cat([noise[:1], noise[1:] - noise[:-1]])[::2]  # new nodes of their own
    z = steps / mechanism.noise_scale
    correlation = (z.T @ z) / len(z)
    off = correlation - torch.diag(correlation.diagonal())
    assert float(off.abs().max()) < 6 / math.sqrt(len(z))


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (10.0, 0.1), (0.1, 1e-5)])
def test_the_scale_is_that_of_another_implementation(
    adjacency: Any, epsilon: float, delta: float
) -> None:
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    z = noise_multiplier_for(
        epsilon=epsilon, delta=delta, sampling_rate=1.0, num_releases=1, adjacency=adjacency
    )
    mechanism = prefix_sum(noise_multiplier=z, adjacency=adjacency, factorization="tree")
    sensitivity = mechanism.statistic.sensitivity(adjacency)
    rounding = mechanism.lattice * math.sqrt(mechanism.dim) / (1 if adjacency != "zero-out" else 2)
    assert rounding < 1e-3 * sensitivity
    expected = get_sigma_gaussian(epsilon, delta) * (sensitivity + rounding) * math.sqrt(5)
    assert mechanism.noise_scale == pytest.approx(expected, rel=1e-6)
    assert mechanism.event == Event(z)


TIGHT = {"outcome_bound": 1.0, "moment_scale": math.sqrt(2)}  # as much as the corner y² would cost
CENTRED = {"outcome_bound": 0.5, "moment_scale": 1.0}


@pytest.mark.parametrize(
    ("beta", "name", "settings", "printed"),
    [
        (0.1, "tree", TIGHT, ("56.9", "21.7", "5.64")),
        (0.1, "sqrt", TIGHT, ("18.6", "7.11", "1.84")),
        (0.1, "sqrt", CENTRED, ("10.5", "4.00", "1.04")),
        (1e-5, "tree", TIGHT, ("615", "74.6", "10.0")),
        (1e-5, "sqrt", TIGHT, ("201", "24.4", "3.27")),
        (1e-5, "sqrt", CENTRED, ("113", "13.7", "1.84")),
    ],
)
def test_noise_of_a_gram_matrix_is_that_of_the_table(
    beta: float, name: str, settings: dict[str, float], printed: tuple[str, ...]
) -> None:
    for alpha, expected in zip((0.1, 1.0, 10.0), printed, strict=True):
        z = noise_multiplier_for(
            epsilon=alpha,
            delta=beta,
            sampling_rate=1.0,
            num_releases=1,
            adjacency="replace-one",
        )
        mechanism = prefix_sum(
            horizon=1023, noise_multiplier=z, factorization=name, centre=0.0, **settings
        )
        worst = max(mechanism.noise_std(t) for t in (511, 1022, 1023))
        unit = torch.zeros(mechanism.dim, dtype=torch.float64)
        unit[mechanism.num_features] = worst  # the first number above the diagonal
        gram, _ = mechanism.gram_and_moment(unit, noise_var=1.0)
        digits = len(expected.split(".")[1]) if "." in expected else 0
        # one unit of the last printed digit: rounding to the lattice may turn it
        assert float(gram[0, 1]) == pytest.approx(float(expected), abs=0.6 * 10.0**-digits)
        assert torch.equal(gram, gram.T)


def test_doubled_horizons_cost_noise() -> None:
    def last(count: int) -> float:
        """Noise of the last sum: the rows of the square root of the matrix of ones."""
        ones = np.tril(np.ones((count, count)))
        root = sqrtm(ones).real
        return float(np.linalg.norm(root[-1]) * np.linalg.norm(root, axis=0).max())

    assert doubling_noise(1) == 1
    assert doubling_noise(15) == pytest.approx(math.hypot(*map(last, (1, 2, 4, 8))) / last(15))
    assert 2.0 < doubling_noise(1023) < 2.1
    with pytest.raises(InputDataError, match="horizon of 1, 3, 7"):
        doubling_noise(1024)


def test_published_noise_is_that_of_the_table_and_too_little_for_large_rewards() -> None:
    table = {0.1: (2866, 287, 28.7), 1e-5: (8597, 860, 86.0)}
    for beta, printed in table.items():
        for alpha, expected in zip((0.1, 1.0, 10.0), printed, strict=True):
            worst = paper_prefix_noise(alpha, beta, 1024, 1.0) * math.sqrt(11)
            assert worst == pytest.approx(expected, rel=2e-3)
    for alpha, beta, edge in [(1, 0.1, 17.8), (1, 1e-5, 15.5), (10, 0.1, 6.8), (10, 1e-5, 11.6)]:
        z = noise_multiplier_for(epsilon=alpha, delta=beta, sampling_rate=1.0, num_releases=1)
        for y, enough in [(edge - 0.1, True), (edge + 0.1, False)]:
            needed = (1 + y**2) * math.sqrt(10) * z  # zero-out, ten nodes
            assert (paper_prefix_noise(alpha, beta, 1024, y) >= needed) is enough
    with pytest.raises(InputDataError, match="alpha, horizon"):
        paper_prefix_noise(1.0, 1.0, 1024, 1.0)


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize("name", NAMES)
def test_without_noise_the_sums_are_exact(name: str) -> None:
    mechanism = prefix_sum(factorization=name)
    steps = [rows(n, 10 * n) for n in (1, 0, 5, 2, 1, 1, 30)]
    seen: list[Tensor] = []
    for records, (_, release) in zip(steps, stream(mechanism, steps, Silent()), strict=True):
        seen.append(records)
        whole = mechanism.statistic.rounded_sum(torch.cat(seen), mechanism.lattice)
        assert torch.equal(release.values, whole.double() * mechanism.lattice)
    a = torch.cat(seen)[:, :-1]
    a = a / a.norm(dim=1, keepdim=True).clamp(min=1.0)
    y = torch.cat(seen)[:, -1:].clamp(0.0, 1.0) - 0.5
    gram, moment = mechanism.gram_and_moment(release.values, noise_var=1.0)
    torch.testing.assert_close(gram, a.T @ a, rtol=0, atol=40 * mechanism.lattice)
    torch.testing.assert_close(moment, a.T @ y, rtol=0, atol=40 * mechanism.lattice)


@pytest.mark.parametrize("name", NAMES)
def test_a_release_knows_nothing_of_later_records(name: str) -> None:
    mechanism = prefix_sum(factorization=name)
    steps = [rows(1, t) for t in range(12)]
    before = values(mechanism, steps)
    for t in (0, 5, 11):
        after = values(mechanism, [*steps[:t], *(rows(1, 50 + i) for i in range(12 - t))])
        assert torch.equal(before[:t], after[:t])
        assert bool((before[t:] != after[t:]).any(dim=1).all())


@pytest.mark.parametrize("name", NAMES)
def test_noise_does_not_depend_on_records(name: str) -> None:
    mechanism = prefix_sum(factorization=name)
    steps = [rows(2, t) for t in range(12)]
    noise = values(mechanism, [torch.zeros(0, 4)] * 12)
    exact = values(mechanism, steps, Silent())
    assert torch.equal(values(mechanism, steps), exact + noise)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("participations", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_worlds_are_as_near_as_the_event_says(
    adjacency: Any, participations: int, name: str
) -> None:
    mechanism = prefix_sum(
        num_features=2,
        factorization=name,
        adjacency=adjacency,
        participations=participations,
        noise_multiplier=0.5,
    )
    _, C = mechanism.matrices()
    # The column that is largest, and its neighbours: what one unit can do at most.
    column = int(C.norm(dim=0).argmax())
    places = [min(column + i, 19) for i in range(participations)]
    present, absent = nothing(20, m=2), nothing(20, m=2)
    for place in places:
        high, low = torch.tensor([[3.0, 0.0, 9.0]]), torch.tensor([[3.0, 0.0, -9.0]])
        present[place] = torch.cat([present[place], high])
        absent[place] = torch.cat([absent[place], low if adjacency == "replace-one" else 0 * high])
    gap = torch.stack(
        [
            (mechanism.statistic.statistics(p) - mechanism.statistic.statistics(q)).sum(dim=0)
            for p, q in zip(present, absent, strict=True)
        ]
    )
    if adjacency == "zero-out":  # features are zero, so the statistic is
        assert float(mechanism.statistic.statistics(absent[column]).abs().max()) == 0
    distance = float((C @ gap).norm()) / mechanism.noise_scale
    claimed = (2 if adjacency == "replace-one" else 1) / mechanism.noise_multiplier
    assert distance <= claimed
    if participations == 1:
        assert distance == pytest.approx(claimed, rel=1e-3)


def test_every_release_lies_on_the_lattice_and_has_no_signed_zero() -> None:
    mechanism = prefix_sum(noise_multiplier=1e-4)
    exponent = math.log2(mechanism.lattice)
    assert exponent == int(exponent)
    for _, release in stream(mechanism, [rows(1, t) for t in range(10)]):
        cells = release.values / mechanism.lattice
        assert torch.equal(cells, cells.round())
    (_, zero), *_ = stream(mechanism, nothing(1), Silent())
    assert not bool(zero.values.signbit().any())


def test_lattice_rounding_is_paid_for() -> None:
    mechanism = prefix_sum(num_features=100, noise_multiplier=1000.0, adjacency="zero-out")
    plain = mechanism.statistic.norm("zero-out")
    rounding = mechanism.lattice * math.sqrt(mechanism.dim) / 2
    assert mechanism.norm >= plain + rounding > 1.04 * plain
    assert mechanism.noise_scale / mechanism.norm == pytest.approx(
        1000.0 * float(mechanism.matrices()[1].norm(dim=0).max())
    )


# ------------------------------------------------------------------ streams


@pytest.mark.parametrize("horizon", [7, 20])  # with all noise kept, and in buffers
@pytest.mark.parametrize("factorization", NAMES)
def test_a_stream_goes_on_from_its_bytes(factorization: str, horizon: int) -> None:
    settings = {"factorization": factorization, "horizon": horizon}
    mechanism = prefix_sum(**settings)
    steps = [rows(t % 3, t) for t in range(horizon)]
    expected = list(stream(mechanism, steps))
    for cut in (cut for cut in (0, 1, 5, 6, 7, 8, 9, 10, 19) if cut < horizon):
        state = expected[cut][0]
        stored = encode(state)
        restored = decode(stored, PrefixState)
        assert encode(restored) == stored
        assert torch.equal(mechanism.release(restored).values, expected[cut][1].values)
        rest = list(stream(prefix_sum(**settings), steps[cut + 1 :], state=restored))
        for (_, found), (_, wanted) in zip(rest, expected[cut + 1 :], strict=True):
            assert torch.equal(found.values, wanted.values)
            assert (found.t, found.noise_std) == (wanted.t, wanted.noise_std)
    wire = decode(encode(expected[-1][1]), PrefixRelease)
    assert torch.equal(wire.values, expected[-1][1].values)


def test_a_resumed_stream_keeps_the_numbers_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [rows(1, t) for t in range(20)]
    expected = list(stream(prefix_sum(), steps))
    state = decode(encode(expected[9][0]), PrefixState)
    known = tree._KNOWN[0][1:]
    monkeypatch.setattr(tree, "_fitted", lambda horizon: known)
    monkeypatch.setattr(tree, "_named", tree._named.__wrapped__)
    elsewhere = prefix_sum()  # where another library fits other numbers
    assert elsewhere.noise_std(20) > expected[-1][1].noise_std * (1 + 5e-5)
    for (_, found), (_, wanted) in zip(
        stream(elsewhere, steps[10:], state=state), expected[10:], strict=True
    ):
        assert torch.equal(found.values, wanted.values)
        assert found.noise_std == wanted.noise_std


def test_the_whole_stream_is_paid_for_before_it_begins() -> None:
    mechanism = prefix_sum()
    budget = Budget(epsilon=6.0, delta=1e-5)
    ledger = Ledger(budget=budget, adjacency="replace-one", unit="record")
    state, after = mechanism.start(ledger=ledger, noise=OSNoise())
    assert [entry.event for entry in after.entries] == [Event(2.0)]
    assert after.entries[0].private
    guarantee = after.guarantee()
    assert guarantee.epsilon == pytest.approx(4.377, abs=1e-2)  # mu = 1
    assert state.t == 0
    with pytest.raises(BudgetExceeded):
        prefix_sum(noise_multiplier=1.0).start(ledger=ledger, noise=OSNoise())
    _, seeded = mechanism.start(ledger=ledger, noise=SEEDED)
    assert not seeded.entries[0].private
    assert state.private


def test_system_noise_is_private_and_never_the_same() -> None:
    first, second = (list(stream(prefix_sum(), nothing(2), OSNoise())) for _ in range(2))
    assert first[0][1].private
    assert first[0][0].private
    assert not torch.equal(first[0][1].values, second[0][1].values)
    assert not next(iter(stream(prefix_sum(), nothing(1))))[1].private


def test_steps_change_no_state() -> None:
    for name in NAMES:
        mechanism = prefix_sum(factorization=name)
        states = [begun(mechanism)]
        kept = [encode(states[0])]
        for state, _ in stream(mechanism, [rows(1, t) for t in range(9)]):
            states.append(state)
            kept.append(encode(state))
        assert [encode(state) for state in states] == kept


def test_before_the_first_step_there_is_a_sum_of_nothing() -> None:
    mechanism = prefix_sum()
    release = mechanism.release(begun(mechanism))
    assert (release.t, release.noise_std) == (0, 0.0)
    assert torch.equal(release.values, torch.zeros(9).double())
    assert mechanism.noise_std(0) == 0


# ------------------------------------------------------------------ costs


@pytest.mark.parametrize("horizon", [1023, 10**4, 10**6])
def test_noise_takes_the_same_room_and_draws_at_any_time(horizon: int) -> None:
    mechanism = prefix_sum(num_features=400, horizon=horizon)
    noise = Counting()
    sizes = set()
    for state, _ in stream(mechanism, nothing(3, m=400), noise):
        held = (state.noise, state.buffers, state.factor)
        sizes.add(sum(tensor.numel() * 8 for tensor in held))
    (size,) = sizes
    assert size <= 5e6
    assert noise.drawn - 3 * mechanism.dim < 10  # but for numbers in the tails
    assert len(encode(state)) <= 5e6


def test_trees_keep_a_vector_for_each_level() -> None:
    mechanism = prefix_sum(horizon=100, factorization="tree")
    noise = Counting()
    *_, (state, _) = stream(mechanism, nothing(100), noise)
    assert state.buffers.shape == (7, 9)
    assert 100 * 9 <= noise.drawn <= 100 * 9 + 5


def test_a_step_costs_little_more_than_its_noise() -> None:
    mechanism = prefix_sum(num_features=100, horizon=10**4)
    records, state = rows(1, 3, m=100), begun(mechanism, OSNoise())
    steps, draws = [], []
    for _ in range(200):
        started = time.process_time_ns()
        state, _ = mechanism.step(state, records, noise=OSNoise(), path=())
        between = time.process_time_ns()
        normal(OSNoise(), mechanism.dim, path=())
        steps.append(between - started)
        draws.append(time.process_time_ns() - between)
    assert min(steps) < 6 * min(draws)
    assert min(steps[100:]) < 1.5 * min(steps[:100])


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"horizon": 0}, "horizon must be an int from 1"),
        ({"horizon": 3.0}, "horizon must be an int"),
        ({"horizon": 2**31}, "horizon must be an int from 1 to"),
        ({"participations": 0}, "participations must be an int"),
        ({"noise_multiplier": 0.0}, "between 1e-6 and 1e9"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be finite"),
        ({"noise_multiplier": 1e6}, "leaves no room for the lattice"),
        ({"noise_multiplier": 1e-6, "horizon": 2**26}, "exceeds the lattice: use a noise"),
        ({"adjacency": "add-remove"}, "adjacency must be one of"),
        ({"unit": "row"}, "unit must be one of"),
        ({"factorization": "cholesky"}, "factorization must be one of"),
        ({"outcome_bound": 0.0}, "bound on outcomes"),
        ({"num_features": 0}, "number of features"),
    ],
    ids=str,
)
def test_refuses_settings_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputDataError, match=words):
        prefix_sum(**changes)


def test_numbers_are_floats_whatever_they_were_given_as() -> None:
    given = {"outcome_bound": 0.3, "centre": 0.1, "noise_multiplier": 0.7}
    rough = {name: np.float32(value) for name, value in given.items()}
    plain = {name: float(value) for name, value in rough.items()}
    assert prefix_sum(**rough).noise_scale == prefix_sum(**plain).noise_scale
    for name, value in given.items():
        with pytest.raises(InputDataError, match=f"{name} must be a number, got Tensor"):
            prefix_sum(**{name: torch.tensor(value)})


def test_refuses_to_go_beyond_the_horizon() -> None:
    mechanism = prefix_sum(horizon=3)
    *_, (state, _) = stream(mechanism, nothing(3))
    with pytest.raises(InputDataError, match=r"horizon of 3 steps.*longer one in advance"):
        mechanism.step(state, torch.zeros(0, 4), noise=SEEDED, path=())
    with pytest.raises(InputDataError, match="horizon of 3 steps"):
        mechanism.noise_std(4)
    with pytest.raises(InputDataError, match="from 0 on"):
        mechanism.noise_std(-1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_features": 4},
        {"outcome_bound": 0.6},
        {"centre": 0.4},
        {"moment_scale": 1.0},
        {"horizon": 21},
        {"noise_multiplier": 2.1},
        {"factorization": "tree"},
        {"adjacency": "zero-out"},
        {"unit": "agent"},
        {"participations": 2},
    ],
    ids=str,
)
def test_refuses_the_state_of_another_mechanism(changes: dict[str, Any]) -> None:
    state, other = begun(prefix_sum()), prefix_sum(**changes)
    m = other.num_features
    with pytest.raises(InputDataError, match="other settings"):
        other.step(state, torch.zeros(0, m + 1), noise=SEEDED, path=())
    with pytest.raises(InputDataError, match="other settings"):
        other.release(state)
    assert prefix_sum().release(state).t == 0


def test_refuses_other_noise_than_the_stream_began_with() -> None:
    mechanism = prefix_sum()
    with pytest.raises(InputDataError, match=r"started with secret noise.*with seeded"):
        mechanism.step(begun(mechanism, OSNoise()), rows(1, 0), noise=SEEDED, path=())
    with pytest.raises(InputDataError, match=r"started with seeded noise.*with secret"):
        mechanism.step(begun(mechanism), rows(1, 0), noise=OSNoise(), path=())


def test_refuses_ledgers_of_another_kind() -> None:
    for ledger in (Ledger(), Ledger(adjacency="replace-one", unit="agent")):
        with pytest.raises(InputDataError, match="The ledger is for adjacency"):
            prefix_sum().start(ledger=ledger, noise=SEEDED)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_refuses_records_that_nothing_bounds_and_draws_nothing(value: float) -> None:
    mechanism, noise = prefix_sum(), Counting()
    state = begun(mechanism, noise)
    bad = rows(2, 0)
    bad[1, 2] = value
    with pytest.raises(InputDataError, match="finite") as caught:
        mechanism.step(state, bad, noise=noise, path=())
    assert not any(character.isdigit() for character in str(caught.value))
    with pytest.raises(BotorchTensorDimensionError, match="n x 4"):
        mechanism.step(state, bad[:, :3], noise=noise, path=())
    assert noise.drawn == 0


def test_refuses_more_records_than_the_lattice_has_room_for() -> None:
    mechanism = prefix_sum(num_features=1, noise_multiplier=1e-6)
    room = int(2.0**51 / (math.sqrt(2) / mechanism.lattice + 1))
    assert 20 < room < 10**6
    state = begun(mechanism)
    state, release = mechanism.step(state, torch.ones(room, 2), noise=SEEDED, path=())
    assert float(release.values[0]) == pytest.approx(room, rel=1e-6)
    assert float((release.values / mechanism.lattice).abs().max()) < 2.0**53
    with pytest.raises(InputDataError, match="exceeds the lattice"):
        mechanism.step(state, torch.ones(1, 2), noise=SEEDED, path=())


def test_refuses_bytes_that_are_no_state() -> None:
    state = begun(prefix_sum())
    misfits: tuple[dict[str, Any], ...] = (
        {"total": state.noise},
        {"noise": state.noise[1:]},
        {"buffers": state.buffers[:, 1:]},
        {"factor": state.factor[:1]},
        {"total": state.total[1:]},
    )
    for changes in misfits:
        with pytest.raises(BotorchTensorDimensionError, match="take one that a mechanism"):
            replace(state, **changes)
    for name, count in (("t", -1), ("records", -1)):
        counts: dict[str, Any] = {name: count}
        with pytest.raises(InputDataError, match="tampered"):
            replace(state, **counts)
    with pytest.raises(MessageError):
        decode(encode(state)[:-1], PrefixState)
    broken = replace(state, factor=-state.factor)
    with pytest.raises(InputDataError, match="below one"):
        prefix_sum().release(broken)


# ------------------------------------------------------------------ words


def test_words_say_what_is_promised_and_hold_no_secrets() -> None:
    mechanism = prefix_sum(factorization="tree", participations=2)
    for expected in ("'replace-one'", "'record'", "horizon=20", "participations=2", "'tree'"):
        assert expected in repr(mechanism)
    (state, release), *_ = stream(mechanism, [rows(1, 0)])
    assert repr(state) == "PrefixState(t=1, secret)"
    assert repr(release).startswith("PrefixRelease(t=1, 9 of PrefixSum(")
    assert repr(release).endswith("not private: seeded noise)")
    assert release.mechanism == repr(mechanism)
