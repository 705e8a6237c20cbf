"""What sums tell: attacks that work on plaintext, and fail on what is encrypted or private.

The main one: a summary of `n < M` records has a gram matrix of rank `n`, whose range is spanned by
the features of the inputs. On the data's dimension `d < M - n` only the inputs themselves have
features in it, so searching for them recovers all inputs; then outcomes follow linearly.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from torch import Tensor

from botorch_fed.models import FeatureMap, InducingFeatures, Summary, summarize
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.channels import (
    _HEADER,
    Epoch,
    Gathered,
    PlainChannel,
    ThresholdCKKSChannel,
)
from botorch_fed.privacy.distributed import DistributedGaussianSum
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise
from botorch_fed.search.region import (
    RegionPlan,
    RegionSearch,
    _compare,
    _feature_map,
    contribution,
    first_plan,
)
from botorch_fed.storage.store import MemoryStore
from test.cases import normal, se, uniform

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
NOISE_VAR = 1e-2
RECORDS, FAR = 4, 0.02
NAMES = ("a", "b", "c")
HEADER = _HEADER.size


def features() -> FeatureMap:
    return InducingFeatures(se(0.5, 0.5), uniform(8, 2, seed=30))


def data(seed: int, n: int = RECORDS) -> tuple[Tensor, Tensor]:
    return uniform(n, 2, seed=seed), normal(n, 1, seed=seed)


def summaries() -> dict[str, Summary]:
    return {
        name: summarize(features(), *data(i + 1), noise_var=NOISE_VAR)
        for i, name in enumerate(NAMES)
    }


def packed() -> dict[str, Tensor]:
    return {name: summary.pack() for name, summary in summaries().items()}


def grid(bound: float = 4096.0) -> PublicGrid:
    return PublicGrid(44, bound, 3)


def plain() -> PrivateSum:
    return PrivateSum(mechanism=None, channel=PlainChannel(grid()), noise_at="none")


def reconstruct(phi: FeatureMap, gram: Tensor, records: int = RECORDS) -> Tensor:
    """The inputs whose features lie in the range of a gram matrix: `records x d`."""
    null = torch.linalg.eigh(gram).eigenvectors[:, : gram.shape[0] - records]

    def outside(x: np.ndarray) -> np.ndarray:
        return (phi(torch.from_numpy(x)[None]) @ null)[0].numpy()

    def slope(x: np.ndarray) -> np.ndarray:
        point = torch.from_numpy(x)
        return torch.autograd.functional.jacobian(lambda p: (phi(p[None]) @ null)[0], point).numpy()

    ticks = np.linspace(0.04, 0.96, 12)
    starts = np.array(list(itertools.product(ticks, ticks)))
    sizes = (phi(torch.from_numpy(starts)) @ null).norm(dim=1).numpy()
    ends = []
    for start in starts[np.argsort(sizes)[:40]]:
        end = least_squares(
            outside, start, jac=slope, bounds=(0, 1), xtol=1e-15, ftol=1e-15, gtol=1e-15
        )
        ends.append((end.cost, end.x))
    found: list[np.ndarray] = []
    for _, x in sorted(ends, key=lambda end: end[0]):
        if all(np.abs(x - other).max() > 1e-3 for other in found):
            found.append(x)
    return torch.from_numpy(np.array(found[:records]))


def outcomes(phi: FeatureMap, X: Tensor, moment: Tensor) -> Tensor:
    """The outcomes at known inputs: the moment is linear in them."""
    Phi = phi(X)
    C = phi.residual(X) + NOISE_VAR * torch.eye(len(X), dtype=torch.float64)
    return torch.linalg.lstsq(torch.linalg.solve(C, Phi).T, moment).solution


def distance(found: Tensor, truth: Tensor) -> float:
    """The largest distance from a true input to the nearest that was found."""
    return float((truth[:, None] - found).norm(dim=2).min(dim=1).values.max())


def nearest(found: Tensor) -> float:
    """The smallest such distance over all agents."""
    return min(distance(found, data(i + 1)[0]) for i in range(3))


# ------------------------------------------------------------------ what a plaintext tells


@pytest.mark.parametrize("name", NAMES)
def test_one_plaintext_summary_gives_inputs_and_outcomes_away(name: str) -> None:
    phi, own = features(), summaries()[name]
    X, Y = data(NAMES.index(name) + 1)
    found = reconstruct(phi, own.gram)
    assert distance(found, X) < 1e-8
    order = (X[:, None] - found).norm(dim=2).argmin(dim=1)
    assert float((outcomes(phi, found, own.moment)[order] - Y).abs().max()) < 1e-8


def test_of_two_agents_each_learns_the_others_summary() -> None:
    own, other = packed()["a"], packed()["b"]
    release = plain().run({"a": own, "b": other})
    difference = release.values - grid().to_values(grid().to_integers(own))
    assert torch.equal(difference, grid().to_values(grid().to_integers(other)))
    gram = Summary.unpack(difference, basis="").gram
    assert distance(reconstruct(features(), gram), data(2)[0]) < 1e-3


def test_consecutive_sums_isolate_a_new_record() -> None:
    phi, (X, Y), (x, y) = features(), data(1), data(9, 1)
    values, late = packed(), packed()
    late["a"] = summarize(phi, torch.cat([X, x]), torch.cat([Y, y]), noise_var=NOISE_VAR).pack()
    change = plain().run(late).values - plain().run(values).values
    sizes = torch.linalg.eigvalsh(Summary.unpack(change, basis="").gram).abs().sort().values
    assert float(sizes[-2] / sizes[-1]) < 1e-7  # rank one, but for the grid
    assert float(sizes[-1]) > 1.0


def test_the_rank_of_a_plaintext_summary_is_the_number_of_records() -> None:
    for n in (1, 3, 6):
        gram = summarize(features(), *data(1, n), noise_var=NOISE_VAR).gram
        assert int(torch.linalg.matrix_rank(gram, rtol=1e-9)) == n


# ------------------------------------------------------------------ sums of many sites

REGION = RegionSearch(num_inducing=8, num_candidates=1, given=100)  # fourteen features
SMOOTH = REGION.kernels.index((4.0, 0.01, 0.1))


def others(plan: RegionPlan, sites: int, records: int, *, site: int = 1) -> tuple[Tensor, Tensor]:
    """The gram matrix that a site has of others, by subtraction, and their inputs."""
    X = [uniform(records, 2, seed=site + i) for i in range(sites)]
    parts = [contribution(REGION, plan, x, (3 * x).sin().sum(dim=1, keepdim=True)) for x in X]
    mine = contribution(REGION, plan, *data(99, 5))
    left = torch.stack([*parts, mine]).sum(dim=0) - mine
    return _compare(REGION, plan, left)[0][0].gram[0], torch.cat(X)


@pytest.mark.parametrize("sites", [1, 2, 3])
def test_early_sums_give_all_records_of_the_others_away(sites: int) -> None:
    """Three records of each: with one other site as with three, there are fewer than features."""
    plan = first_plan(REGION, 2)
    gram, X = others(plan, sites, 3)
    phi = _feature_map(REGION, plan, plan.kernels[0])
    assert distance(reconstruct(phi, gram, 3 * sites), X) < 1e-6


def test_with_as_many_records_as_features_the_attack_fails() -> None:
    """What `RelatedSum(held=True)` waits for."""
    plan = first_plan(REGION, 2)
    gram, X = others(plan, 3, 5)
    phi = _feature_map(REGION, plan, plan.kernels[0])
    assert len(X) > len(gram)
    assert distance(reconstruct(phi, gram, len(gram) - 1), X) > 0.02


def test_the_difference_of_two_sums_can_show_the_new_records_of_others() -> None:
    """Noise outweighs the process, and the box has stayed: old records nearly cancel."""
    before = replace(first_plan(REGION, 2), kernels=(SMOOTH,))
    after = replace(before, t=1)
    quadratic = slice(0, 6)
    X = [uniform(21, 2, seed=1 + i) for i in range(3)]
    grams = []
    for plan, records in ((before, 20), (after, 21)):
        parts = [contribution(REGION, plan, x[:records], x[:records, :1]) for x in X]
        grams.append(_compare(REGION, plan, torch.stack(parts).sum(dim=0))[0][0].gram[0])
    change = (grams[1] - grams[0])[quadratic, quadratic]
    phi = _feature_map(REGION, after, SMOOTH)
    found = reconstruct(lambda x: phi(x)[..., quadratic], change @ change, 3)  # type: ignore[arg-type]
    assert distance(found, torch.stack([x[20] for x in X])) < 0.05


# ------------------------------------------------------------------ what the server sees instead


def test_the_attack_fails_on_the_sum_of_three() -> None:
    release = plain().run(packed())
    gram = Summary.unpack(release.values, basis="").gram
    assert int(torch.linalg.matrix_rank(gram, rtol=1e-9)) == 8
    assert nearest(reconstruct(features(), gram)) > FAR


def test_the_attack_fails_on_ciphertexts() -> None:
    channel, epoch = ThresholdCKKSChannel(grid()), Epoch("run", 0, NAMES)
    stores = {name: MemoryStore() for name in NAMES}
    heard: Gathered = ()
    for phase in range(channel.setup_phases):
        messages = {n: channel.prepare(phase, epoch, n, heard, stores[n]) for n in NAMES}
        heard = (*heard, channel.gather(messages, epoch=epoch, gathered=heard))

    def sent(values: Tensor, round: int) -> bytes:
        key = channel.joint_key(epoch, heard, me="a", secrets=stores["a"])
        integers = grid().to_integers(values)
        return channel.protect(
            integers, epoch=epoch, round=round, me="a", key=key, secrets=stores["a"]
        )

    truth = packed()["a"]
    first, zeros = sent(truth, 0), sent(0 * truth, 1)
    assert len(first) == len(zeros)
    # Bits are fair, whatever is inside: five errors, and primes a little below a power of two.
    for payload in (first, zeros):
        bits = np.unpackbits(np.frombuffer(payload[-100_000:], dtype=np.uint8))
        assert abs(bits.mean() - 0.5) < 2.5 / np.sqrt(len(bits)) + 0.002
    # The numbers that stand where a plaintext would have them lead nowhere.
    start = HEADER + 32
    words = np.frombuffer(first[start : start + 8 * 44], "<i8").astype(np.float64) / 2.0**63
    gram = Summary.unpack(torch.from_numpy(words), basis="").gram
    assert distance(reconstruct(features(), gram), data(1)[0]) > FAR
    correlation = np.corrcoef(words, truth.numpy())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(44)


@pytest.mark.parametrize("only", [False, True])
def test_the_attack_fails_on_the_private_release(only: bool) -> None:
    noise, values = InsecureSeededNoise(1), packed()
    if only:  # even if the others contribute nothing
        values = {name: v if name == "a" else 0 * v for name, v in values.items()}
    mechanism = DistributedGaussianSum(
        dim=44, num_agents=3, clip_norm=50.0, noise_multiplier=1.0, colluding=1
    )
    private_sum = PrivateSum(
        mechanism=mechanism, channel=PlainChannel(mechanism.grid), noise_at="agent"
    )
    release = private_sum.run(values, noise=noise)
    gram = Summary.unpack(release.values, basis="").gram
    assert distance(reconstruct(features(), gram), data(1)[0]) > FAR
    # A new record no longer stands out.
    again = private_sum.run(values, noise=noise, path=(2,))
    change = Summary.unpack(again.values - release.values, basis="").gram
    sizes = torch.linalg.eigvalsh(change).abs().sort().values
    assert float(sizes[-2] / sizes[-1]) > 0.1
