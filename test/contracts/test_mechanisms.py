"""What every mechanism promises."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.errors import BudgetExceeded
from botorch_fed.privacy import (
    Budget,
    CorrelatedGaussianSum,
    FixedSizeSampling,
    GaussianMechanism,
    GaussianSum,
    InsecureSeededNoise,
    Ledger,
    OSNoise,
    PoissonSampling,
    SharedLedger,
    WeightedGaussianSum,
)
from botorch_fed.privacy.distributed import (
    DistributedGaussianSum,
    DistributedMechanism,
    DistributedRecordSum,
)
from botorch_fed.privacy.hazmat.noise import Path, lattice_step
from botorch_fed.privacy.increments import BlockSum, LocalGaussian
from botorch_fed.privacy.tree import PrefixSum
from botorch_fed.rng import generator

pytestmark = pytest.mark.filterwarnings(
    "ignore::botorch_fed.privacy.mechanisms.SignalWarning"  # a dozen agents are few
)

N, M, P = 12, 7, 3
COMMON: dict[str, Any] = {"num_agents": N, "dim": M, "clip_norm": 2.0, "noise_multiplier": 1.5}
REGIONS = (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0)


def mean(**changes: Any) -> GaussianMechanism:
    return GaussianSum(**{**COMMON, **changes})


def weighted(**changes: Any) -> GaussianMechanism:
    weights = generator(0, "weights").uniform(P, N) / N
    return WeightedGaussianSum(weights=weights, **{**COMMON, **changes})


def published(**changes: Any) -> GaussianMechanism:
    weights = generator(0, "weights").uniform(P, N) / N
    return WeightedGaussianSum(weights=weights, paper_noise=True, **{**COMMON, **changes})


def correlated(**changes: Any) -> GaussianMechanism:
    settings = {**COMMON, **changes}
    return CorrelatedGaussianSum(regions=REGIONS, num_regions=P, contrast=1.3, **settings)


def by_sorted_region(**changes: Any) -> GaussianMechanism:
    settings = {**COMMON, **changes}
    regions = tuple(sorted(REGIONS))
    return CorrelatedGaussianSum(regions=regions, num_regions=P, contrast=15.0, **settings)


def uniform_stage(**changes: Any) -> GaussianMechanism:
    settings = {**COMMON, **changes}
    return CorrelatedGaussianSum(regions=REGIONS, num_regions=P, contrast=0.0, **settings)


MECHANISMS = [mean, weighted, published, correlated, by_sorted_region, uniform_stage]
mechanisms = pytest.mark.parametrize("make", MECHANISMS, ids=lambda f: f.__name__)
Make = Callable[..., Any]
SEEDED = InsecureSeededNoise(5)


class NoNoise:
    """Coins as usual, but noise that is zero."""

    private = False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        if "noise" in path:
            return torch.full(shape, 0.5, dtype=torch.float64)
        return SEEDED.uniform(*shape, path=path)


class NoSource:
    """May not be asked."""

    private = False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        raise AssertionError("noise was drawn")


def messages(scale: float = 3.0) -> Tensor:
    return scale * generator(0, "messages").normal(N, M)  # most of them are clipped


def released(mechanism: Any, contributions: Any, noise: Any = SEEDED, t: int = 1) -> Tensor:
    ledger = Ledger(adjacency=mechanism.adjacency, unit=mechanism.unit)
    return mechanism.release(contributions, ledger=ledger, noise=noise, path=(t,))[0].values


def clean(mechanism: Any, contributions: Tensor) -> Tensor:
    """The formula of the documentation, on the agents who take part in round 1."""
    taking = mechanism.sampling.draw(N, noise=SEEDED, path=(1, "sampling"))
    norms = contributions.norm(dim=1, keepdim=True)
    clipped = contributions * (mechanism.clip_norm / norms).clamp(max=1.0)
    kept = torch.where(taking[:, None], clipped, torch.zeros_like(clipped))
    return mechanism.weights @ kept / mechanism.sampling_rate


def rounding(mechanism: Any) -> float:
    """More than the lattice can move a released coordinate."""
    step = lattice_step(mechanism.noise_scale)
    return step * float(mechanism.decoder.abs().sum(dim=1).max())


# ------------------------------------------------------------------ the release


@mechanisms
@pytest.mark.parametrize("rate", [0.35, 1.0])
def test_without_noise_it_is_the_weighted_sum_of_clipped_vectors(make: Make, rate: float) -> None:
    mechanism = make(sampling=PoissonSampling(rate))
    values = released(mechanism, messages(), NoNoise())
    assert values.shape == (*mechanism.weights.shape[:1], M)
    assert values.dtype == torch.float64
    expected = clean(mechanism, messages())
    torch.testing.assert_close(values, expected, rtol=0, atol=rounding(mechanism))


@mechanisms
def test_sum_is_exact_before_the_lattice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "botorch_fed.privacy.mechanisms.lattice_gaussian", lambda x, std, *, noise, path: x
    )
    mechanism = make(sampling=PoissonSampling(0.35))
    expected = clean(mechanism, messages())
    values = released(mechanism, messages())
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)


@mechanisms
@pytest.mark.parametrize("t", range(3))
def test_tensor_mapping_and_blocks_are_the_same_sum(make: Make, t: int) -> None:
    mechanism, X = make(sampling=PoissonSampling(0.5)), messages()
    mapping = {n: X[n] for n in reversed(range(N))}
    blocks = [(5, X[5:]), (0, X[:0]), (0, X[:1]), (1, X[1:5])]
    first = released(mechanism, X, t=t)
    for other in (mapping, blocks, iter(blocks)):
        torch.testing.assert_close(
            released(mechanism, other, t=t), first, rtol=0, atol=2 * rounding(mechanism)
        )


@mechanisms
def test_large_blocks_are_cut_and_agents_keep_their_places(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, X = make(sampling=PoissonSampling(0.5)), messages()
    whole = released(mechanism, X)
    monkeypatch.setattr("botorch_fed.privacy.mechanisms._MAX_ROWS", 5)
    atol = 2 * rounding(mechanism)
    torch.testing.assert_close(released(mechanism, X), whole, rtol=0, atol=atol)
    mapping = dict(enumerate(X))
    torch.testing.assert_close(released(mechanism, mapping), whole, rtol=0, atol=atol)


@mechanisms
def test_missing_agents_contribute_zero_and_nothing_is_renormalised(make: Make) -> None:
    mechanism, X = make(), messages()
    some = {2: X[2], 7: X[7]}
    padded = torch.zeros_like(X)
    padded[[2, 7]] = X[[2, 7]]
    for other in (some, [(7, X[7:8]), (2, X[2:3])]):
        torch.testing.assert_close(
            released(mechanism, other),
            released(mechanism, padded),
            rtol=0,
            atol=2 * rounding(mechanism),
        )


@mechanisms
@pytest.mark.parametrize("nobody", [{}, [], torch.zeros(N, M)], ids=["mapping", "blocks", "zeros"])
def test_an_empty_round_releases_noise(make: Make, nobody: Any) -> None:
    mechanism = make()
    values = released(mechanism, nobody)
    assert bool((values != 0).all())
    ratio = values.square().mean(dim=1).sqrt() / mechanism.noise_std
    assert float(ratio.min()) > 0.2
    assert float(ratio.max()) < 3


@mechanisms
def test_an_empty_sample_releases_noise(make: Make) -> None:
    mechanism = make(sampling=PoissonSampling(1e-9))
    assert not bool(mechanism.sampling.draw(N, noise=SEEDED, path=(1, "sampling")).any())
    values = released(mechanism, messages())
    assert bool((values != 0).all())
    assert torch.equal(values, released(mechanism, {}))


@mechanisms
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_every_row_has_the_stated_noise(make: Make, rate: float) -> None:
    mechanism = make(sampling=PoissonSampling(rate), dim=100)
    draws = torch.stack([released(mechanism, {}, t=t) for t in range(200)])
    # 20,000 draws of a row: 2 % is four standard errors
    std = draws.transpose(0, 1).flatten(1).std(dim=1)
    torch.testing.assert_close(std, mechanism.noise_std, rtol=0.02, atol=0)
    # and the rows have the covariance of decoded independent noise: five standard errors
    flat = draws.transpose(0, 1).flatten(1)
    B = mechanism.decoder
    expected = mechanism.noise_scale**2 * B @ B.T
    scale = mechanism.noise_std[:, None] * mechanism.noise_std
    slack = 5 * math.sqrt(2 / flat.shape[1])
    assert float(((torch.cov(flat) - expected) / scale).abs().max()) < slack


@mechanisms
def test_noise_is_where_the_lattice_says(make: Make) -> None:
    mechanism = make()
    values = released(mechanism, messages())
    if type(mechanism) is not CorrelatedGaussianSum:
        cells = values / lattice_step(mechanism.noise_scale)
        assert torch.equal(cells, cells.round())


# ------------------------------------------------------------------ the bound


@mechanisms
@pytest.mark.parametrize("rate", [0.35, 1.0])
def test_brute_force_difference_is_the_sensitivity(make: Make, rate: float) -> None:
    mechanism = make(sampling=PoissonSampling(rate))
    # values = B Y, and one agent moves Y by a_n (x) v, B a_n = phi_n
    columns = torch.linalg.pinv(mechanism.decoder) @ mechanism.weights
    largest = float(columns.norm(dim=0).max()) * mechanism.clip_norm / rate
    assert mechanism.sensitivity == pytest.approx(largest, rel=1e-12)


@mechanisms
def test_no_agent_moves_the_joint_release_by_more_than_the_sensitivity(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "botorch_fed.privacy.mechanisms.lattice_gaussian", lambda x, std, *, noise, path: x
    )
    mechanism, X = make(), messages(100.0)
    inverse = torch.linalg.pinv(mechanism.decoder)
    moves = []
    for n in range(N):
        without = X.clone()
        without[n] = 0
        moved = inverse @ (released(mechanism, X) - released(mechanism, without))
        moves.append(float(moved.norm()))
    assert max(moves) == pytest.approx(mechanism.sensitivity, rel=1e-12)


@mechanisms
def test_one_agent_moves_the_actual_release_by_what_the_noise_is_scaled_to(make: Make) -> None:
    mechanism, X = make(), messages(100.0)
    inverse = torch.linalg.pinv(mechanism.decoder)
    bound = mechanism.noise_scale / mechanism.noise_multiplier
    for n in range(N):
        without = {k: X[k] for k in range(N) if k != n}
        moved = inverse @ (released(mechanism, X) - released(mechanism, without))
        assert float(moved.norm()) <= bound


@mechanisms
def test_noise_covers_sensitivity_rounding_and_little_more(make: Make) -> None:
    mechanism = make()
    z, outputs = mechanism.noise_multiplier, mechanism.weights.shape[0]
    step = lattice_step(mechanism.noise_scale)
    needed = z * (mechanism.sensitivity * (1 + 2.0**-30) + step * math.sqrt(outputs * M))
    assert mechanism.noise_scale >= needed
    if "paper_noise=True" not in repr(mechanism):
        assert mechanism.noise_scale == pytest.approx(z * mechanism.sensitivity, rel=1e-4)


@mechanisms
def test_what_is_beyond_the_bound_counts_as_at_the_bound(make: Make) -> None:
    mechanism, X = make(), messages(100.0)
    far = X * torch.logspace(0, 200, N, dtype=torch.float64)[:, None]  # squares overflow
    torch.testing.assert_close(
        released(mechanism, far), released(mechanism, X), rtol=0, atol=2 * rounding(mechanism)
    )


@mechanisms
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["tensor", "mapping", "blocks"])
def test_refuses_what_is_not_finite_and_names_the_agent(
    make: Make, value: float, form: str, tmp_path: FilePath
) -> None:
    mechanism, X = make(sampling=PoissonSampling(1e-9)), messages()
    X[8, 2] = value
    forms: dict[str, Any] = {
        "tensor": X,
        "mapping": {8: X[8], 3: X[3]},
        "blocks": [(0, X[:6]), (6, X[6:])],
    }
    with SharedLedger(tmp_path / "ledger") as ledger:
        with pytest.raises(InputDataError, match="agent 8 is not finite"):
            mechanism.release(forms[form], ledger=ledger, noise=SEEDED, path=(1,))
        # Only blocks, which nobody can look at in advance, have been paid for.
        assert ledger.releases == (form == "blocks")


# ------------------------------------------------------------------ paying


@mechanisms
@pytest.mark.parametrize("rate", [0.35, 1.0])
def test_pays_its_event_once_per_release(make: Make, rate: float) -> None:
    mechanism = make(sampling=PoissonSampling(rate))
    assert mechanism.event.noise_multiplier == mechanism.noise_multiplier
    assert mechanism.event.sampling_rate == rate
    before = Ledger()
    _, ledger = mechanism.release(messages(), ledger=before, noise=SEEDED, path=(1,))
    _, ledger = mechanism.release(messages(), ledger=ledger, noise=SEEDED, path=(2,))
    assert before.releases == 0
    assert ledger.releases == 2
    assert {entry.event for entry in ledger.entries} == {mechanism.event}
    assert not any(entry.private for entry in ledger.entries)
    assert not ledger.guarantee(delta=1e-3).private
    _, ledger = mechanism.release(messages(), ledger=before, noise=OSNoise(), path=(1,))
    assert ledger.guarantee(delta=1e-3).private


@mechanisms
def test_beyond_the_budget_nothing_is_computed(make: Make) -> None:
    mechanism = make()

    def blocks() -> Iterator[tuple[int, Tensor]]:
        raise AssertionError("contributions were read")
        yield

    ledger = Ledger(budget=Budget(1e-3, 1e-5))
    with pytest.raises(BudgetExceeded):
        mechanism.release(blocks(), ledger=ledger, noise=NoSource(), path=(1,))


@mechanisms
def test_ledger_on_disk_is_paid_before_the_release(make: Make, tmp_path: FilePath) -> None:
    class Watching:
        private = False

        def uniform(self, *shape: int, path: Path) -> Tensor:
            with SharedLedger(tmp_path / "ledger", budget=budget) as other:
                (entry,) = other.ledger.entries
            assert entry.event.sampling_rate == 0.35
            return SEEDED.uniform(*shape, path=path)

    mechanism, budget = make(sampling=PoissonSampling(0.35)), Budget(50.0, 1e-3)
    with SharedLedger(tmp_path / "ledger", budget=budget) as file:
        _, after = mechanism.release(messages(), ledger=file, noise=Watching(), path=(1,))
        assert after is file
        assert file.releases == 1


@mechanisms
@pytest.mark.parametrize("other", [{"adjacency": "replace-one"}, {"unit": "record"}])
def test_refuses_a_ledger_of_another_kind(make: Make, other: Any) -> None:
    with pytest.raises(InputDataError, match="give both the same"):
        make().release(messages(), ledger=Ledger(**other), noise=NoSource(), path=(1,))
    mechanism = make(**other)
    _, ledger = mechanism.release(messages(), ledger=Ledger(**other), noise=SEEDED, path=(1,))
    assert ledger.releases == 1


@mechanisms
def test_samples_of_fixed_size_need_replace_one(make: Make) -> None:
    with pytest.raises(InputDataError, match="replace-one"):
        make(sampling=FixedSizeSampling(4))
    with pytest.raises(InputDataError, match="cannot be drawn"):
        make(sampling=FixedSizeSampling(N + 1), adjacency="replace-one")
    mechanism = make(sampling=FixedSizeSampling(4), adjacency="replace-one")
    assert (mechanism.event.sample_size, mechanism.event.population) == (4, N)
    values = released(mechanism, messages(), NoNoise())
    expected = clean(mechanism, messages())
    torch.testing.assert_close(values, expected, rtol=0, atol=rounding(mechanism))


# ------------------------------------------------------------------ randomness


@mechanisms
def test_seeded_noise_replays_by_path_and_is_marked(make: Make) -> None:
    mechanism = make(sampling=PoissonSampling(0.5))
    release, _ = mechanism.release(messages(), ledger=Ledger(), noise=SEEDED, path=(1,))
    assert torch.equal(release.values, released(mechanism, messages()))
    assert not torch.equal(release.values, released(mechanism, messages(), t=2))
    assert not release.private
    assert "not private: seeded noise" in repr(release)


@mechanisms
def test_system_noise_follows_no_seed(make: Make) -> None:
    mechanism, values = make(), []
    for _ in range(2):
        torch.manual_seed(0)
        release, _ = mechanism.release(messages(), ledger=Ledger(), noise=OSNoise(), path=(1,))
        values.append(release.values)
        assert release.private
        assert "seeded" not in repr(release)
    assert not torch.equal(*values)


@mechanisms
def test_agents_are_sampled_independently_at_the_rate(make: Make) -> None:
    mechanism, runs, rate = make(sampling=PoissonSampling(0.3)), 3000, 0.3
    draws = torch.stack(
        [mechanism.sampling.draw(N, noise=SEEDED, path=(t, "sampling")) for t in range(runs)]
    ).double()
    # five standard errors for each of N means and N (N - 1) / 2 correlations
    slack = 5 * math.sqrt(rate * (1 - rate) / runs)
    assert float((draws.mean(dim=0) - rate).abs().max()) < slack
    assert float((torch.corrcoef(draws.T) - torch.eye(N)).abs().max()) < 5 / math.sqrt(runs)


# ------------------------------------------------------------------ what it says


@mechanisms
def test_public_bound_on_the_signal_holds_and_can_be_reached(make: Make) -> None:
    mechanism = make()
    together = torch.ones(N, M, dtype=torch.float64) * 10  # all agree, all are clipped
    signal = clean(mechanism, together).norm(dim=1) / (mechanism.noise_std * math.sqrt(M))
    torch.testing.assert_close(mechanism.best_signal_to_noise, signal, rtol=1e-9, atol=0)


@mechanisms
def test_words_state_the_assumptions_and_no_values(make: Make) -> None:
    mechanism = make(sampling=PoissonSampling(0.35))
    words = repr(mechanism)
    for expected in (type(mechanism).__name__, "'zero-out'", "'agent'", "rate=0.35", "clip_norm=2"):
        assert expected in words
    release, _ = mechanism.release(messages(), ledger=Ledger(), noise=SEEDED, path=(1,))
    assert words in repr(release)
    for value in release.values.flatten().tolist():
        assert f"{value:.4f}" not in repr(release)


@mechanisms
def test_documentation_states_adjacency_trust_guarantee_and_proof(make: Make) -> None:
    text = type(make()).__doc__ or ""
    assert re.search(r"Adjacency: .* Trust: .* Guarantee: .* Proof \(sketch\)", text, re.DOTALL)


@mechanisms
def test_settings_are_frozen_and_survive_a_copy(make: Make) -> None:
    mechanism = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.noise_multiplier = 0.0
    for twin in (copy.deepcopy(mechanism), pickle.loads(pickle.dumps(mechanism))):
        assert torch.equal(released(twin, messages()), released(mechanism, messages()))
    quieter = dataclasses.replace(mechanism, noise_multiplier=3.0)
    torch.testing.assert_close(quieter.noise_std, 2 * mechanism.noise_std, rtol=1e-4, atol=0)


@mechanisms
def test_inputs_stay_as_they_are_and_gradients_stop(make: Make) -> None:
    mechanism, X = make(), messages().requires_grad_()
    before = X.detach().clone()
    assert not released(mechanism, X).requires_grad
    assert not released(mechanism, dict(enumerate(X))).requires_grad
    assert torch.equal(X.detach(), before)


@mechanisms
def test_float32_is_promoted(make: Make) -> None:
    mechanism, X = make(), messages().float()
    assert released(mechanism, X).dtype == torch.float64
    assert torch.equal(released(mechanism, X), released(mechanism, X.double()))


@mechanisms
@pytest.mark.parametrize("shape", [(N, M + 1), (N - 1, M), (N * M,)])
def test_refuses_tensors_that_do_not_fit(make: Make, shape: tuple[int, ...]) -> None:
    with pytest.raises(BotorchTensorDimensionError, match=f"{N} x {M}"):
        released(make(), torch.zeros(shape))


@mechanisms
@pytest.mark.parametrize("agent", [-1, N, "0", True, 1.0])
def test_refuses_strangers(make: Make, agent: Any) -> None:
    with pytest.raises(InputDataError, match=f"0 to {N - 1}"):
        released(make(), {agent: torch.zeros(M)})


@mechanisms
def test_refuses_vectors_and_blocks_that_do_not_fit(make: Make) -> None:
    with pytest.raises(BotorchTensorDimensionError, match="agent 3"):
        released(make(), {3: torch.zeros(M + 1)})
    with pytest.raises(BotorchTensorDimensionError, match=f"K x {M}"):
        released(make(), [(0, torch.zeros(M))])
    for first in (-1, N - 1):
        with pytest.raises(InputDataError, match=f"0 to {N - 1}"):
            released(make(), [(first, torch.zeros(2, M))])


@mechanisms
def test_an_agent_contributes_once(make: Make) -> None:
    with pytest.raises(InputDataError, match="once"):
        released(make(), [(0, torch.zeros(4, M)), (3, torch.zeros(2, M))])


@mechanisms
@pytest.mark.parametrize(
    "changes",
    [
        {"num_agents": 0},
        {"num_agents": 12.0},
        {"dim": 0},
        {"dim": True},
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"clip_norm": math.inf},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"noise_multiplier": 2e5},  # no room for the lattice
        {"noise_multiplier": 1e-9},  # beyond the lattice
        {"adjacency": "add-remove"},
        {"unit": "user"},
    ],
    ids=str,
)
def test_refuses_settings_without_a_guarantee(make: Make, changes: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        make(**changes)


# ------------------------------------------------------------------ noise added by the agents


def vectors(**changes: Any) -> DistributedMechanism:
    settings = {**COMMON, "colluding": 2, "dropping": 3, **changes}
    return DistributedGaussianSum(**settings)


def statistics(**changes: Any) -> DistributedMechanism:
    settings: dict[str, Any] = {"num_features": 3, "outcome_bound": 0.8, "max_records": 20}
    shared = {"num_agents": N, "noise_multiplier": 1.5, "colluding": 2, "dropping": 3}
    return DistributedRecordSum(**{**shared, **settings, **changes})


DISTRIBUTED = pytest.mark.parametrize("make", [vectors, statistics], ids=lambda f: f.__name__)
ADJACENCIES = pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])


def units(mechanism: DistributedMechanism, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions that differ in one unit: with it, with another in its place, without it."""
    scale = 10.0 ** (t % 5 - 2)
    one, other = (scale * generator(t, word).normal(20, 4) for word in ("one", "other"))
    if isinstance(mechanism, DistributedGaussianSum):
        first, second = one.flatten()[:M], -other.flatten()[:M]
        return first, second, 0 * first
    return one, torch.cat([one[:-1], other[-1:]]), one[:-1]


@DISTRIBUTED
@ADJACENCIES
def test_no_unit_moves_a_contribution_by_more_than_the_noise_is_scaled_to(
    make: Make, adjacency: str
) -> None:
    mechanism, step = make(adjacency=adjacency), make(adjacency=adjacency).grid.step
    for t in range(100):
        present, replaced, absent = map(mechanism.bounded, units(mechanism, t))
        if adjacency == "zero-out":
            assert float((present - absent).double().norm()) * step <= mechanism.norm
        else:
            assert float((present - replaced).double().norm()) * step <= 2 * mechanism.norm


@DISTRIBUTED
@ADJACENCIES
def test_event_and_noise_come_from_the_same_multiplier(make: Make, adjacency: str) -> None:
    mechanism = make(adjacency=adjacency)
    assert mechanism.event.noise_multiplier == mechanism.noise_multiplier
    assert mechanism.event.discrete
    assert mechanism.noise_scale == mechanism.noise_multiplier * mechanism.norm
    assert mechanism.agent_std**2 * (N - 5) == pytest.approx(mechanism.noise_scale**2, rel=1e-12)
    louder = dataclasses.replace(mechanism, noise_multiplier=3.0, grid=None)
    assert louder.noise_std == pytest.approx(2 * mechanism.noise_std, rel=1e-4)


@DISTRIBUTED
def test_contributions_are_integers_with_noise_that_replays_by_path(make: Make) -> None:
    mechanism = make()
    values = units(mechanism, 2)[0].requires_grad_()
    first, again, other = (
        mechanism.contribution(values, noise=SEEDED, path=(p,)) for p in ("a", "a", "b")
    )
    assert first.dtype == torch.int64
    assert first.shape == (mechanism.grid.dim,)
    assert torch.equal(first, again)
    assert bool((first != other).all())
    share = mechanism.share_of_noise(noise=SEEDED, path=("a",))
    assert torch.equal(first - share, mechanism.bounded(values))
    system = [mechanism.contribution(values, noise=OSNoise(), path=("a",)) for _ in range(2)]
    assert not torch.equal(*system)


@DISTRIBUTED
def test_no_contribution_leaves_the_grid(make: Make) -> None:
    mechanism = make()
    for t in range(50):
        values = 1e6 * units(mechanism, t)[0]
        integers = mechanism.contribution(values, noise=SEEDED, path=(t,))
        mechanism.grid.check_integers(integers)


@DISTRIBUTED
def test_words_and_documentation_of_distributed_noise_state_the_assumptions(make: Make) -> None:
    mechanism = make()
    for expected in ("colluding=2", "dropping=3", "'zero-out'", f"unit={mechanism.unit!r}"):
        assert expected in repr(mechanism)
    assert re.search(r"Adjacency: .* Unit: .* Trust, guarantee and proof", type(mechanism).__doc__)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.noise_multiplier = 0.0
    twin = copy.deepcopy(mechanism)
    assert twin == mechanism
    assert twin.noise_scale == mechanism.noise_scale


# ------------------------------------------------------------------ streams, increments, blocks

BOUNDED: dict[str, Any] = {"outcome_bound": 0.8, "centre": 0.3, "noise_multiplier": 1.5}


def prefixes(**changes: Any) -> PrefixSum:
    return PrefixSum(**{"num_features": 3, "horizon": 20, **BOUNDED, **changes})


def prefixes_of_a_tree(**changes: Any) -> PrefixSum:
    return prefixes(factorization="tree", **changes)


def increments(**changes: Any) -> LocalGaussian:
    return LocalGaussian(**{"num_features": 3, **BOUNDED, **changes})


def blocks(**changes: Any) -> BlockSum:
    return BlockSum(**{**BOUNDED, **changes})


STREAMS = pytest.mark.parametrize(
    "make", [prefixes, prefixes_of_a_tree, increments, blocks], ids=lambda f: f.__name__
)


def paid(mechanism: Any, ledger: Any, noise: Any) -> Any:
    """The ledger after a stream, a run or an increment has been paid for."""
    if isinstance(mechanism, LocalGaussian):
        return mechanism.release(torch.zeros(1, 4), ledger=ledger, noise=noise, path=(1,))[1]
    return mechanism.start(ledger=ledger, noise=noise)[1]


def scale(mechanism: Any) -> float:
    return float(mechanism.noise_std if isinstance(mechanism, BlockSum) else mechanism.noise_scale)


@STREAMS
@ADJACENCIES
def test_streams_pay_their_event_once_and_scale_their_noise_by_it(
    make: Make, adjacency: Any
) -> None:
    mechanism = make(adjacency=adjacency)
    before = Ledger(adjacency=adjacency, unit="record")
    ledger = paid(mechanism, before, SEEDED)
    assert before.releases == 0
    assert [entry.event for entry in ledger.entries] == [mechanism.event]
    assert mechanism.event.noise_multiplier == 1.5
    assert not ledger.guarantee(delta=1e-3).private
    assert paid(mechanism, before, OSNoise()).guarantee(delta=1e-3).private
    louder = make(adjacency=adjacency, noise_multiplier=3.0)
    assert scale(louder) == pytest.approx(2 * scale(mechanism), rel=1e-5)
    assert scale(mechanism) >= 1.5 * mechanism.norm * (1 - 1e-15)


@STREAMS
def test_streams_beyond_the_budget_or_with_another_ledger_draw_nothing(make: Make) -> None:
    mechanism = make()
    poor = Ledger(adjacency="replace-one", unit="record", budget=Budget(1e-3, 1e-5))
    with pytest.raises(BudgetExceeded):
        paid(mechanism, poor, NoSource())
    for other in ({"unit": "record"}, {"adjacency": "replace-one"}):
        with pytest.raises(InputDataError, match="give both the same"):
            paid(mechanism, Ledger(**other), NoSource())


@STREAMS
def test_words_and_documentation_of_streams_state_the_assumptions(make: Make) -> None:
    mechanism = make()
    for expected in ("outcome_bound=0.8", "noise_multiplier=1.5", "unit='record'", "adjacency"):
        assert expected in repr(mechanism)
    text = type(mechanism).__doc__ or ""
    assert re.search(r"Adjacency: .* Unit: .* Trust.* guarantee.* proof", text, re.DOTALL | re.I)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.noise_multiplier = 0.0
    for twin in (copy.deepcopy(mechanism), pickle.loads(pickle.dumps(mechanism))):
        assert repr(twin) == repr(mechanism)
        assert scale(twin) == scale(mechanism)


@STREAMS
@pytest.mark.parametrize(
    "changes",
    [
        {"outcome_bound": 0.0},
        {"outcome_bound": math.nan},
        {"centre": math.inf},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"adjacency": "add-remove"},
        {"unit": "user"},
    ],
    ids=str,
)
def test_streams_refuse_settings_without_a_guarantee(make: Make, changes: dict[str, Any]) -> None:
    with pytest.raises(InputDataError):
        make(**changes)
