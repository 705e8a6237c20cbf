"""A private sum: what goes together, who pays when, and what everybody learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from botorch_fed.errors import BudgetExceeded, ProtocolError
from botorch_fed.privacy.accounting import Budget, Event, Ledger
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.channels import (
    Channel,
    CKKSChannel,
    Epoch,
    PlainChannel,
    ThresholdCKKSChannel,
)
from botorch_fed.privacy.distributed import DistributedGaussianSum, DistributedRecordSum
from botorch_fed.privacy.grid import PublicGrid
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise, Path
from botorch_fed.privacy.mechanisms import GaussianSum, PoissonSampling
from botorch_fed.privacy.shared_ledger import SharedLedger
from botorch_fed.rng import generator
from botorch_fed.storage.store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.mechanisms.SignalWarning")
SEEDED = InsecureSeededNoise(7)
NAMES = tuple(f"site-{i}" for i in range(5))
DIM = 14
GRID = PublicGrid(DIM, 50.0, 5)


class NoSource:
    """May not be asked."""

    private = False

    def uniform(self, *shape: int, path: Path) -> Tensor:
        raise AssertionError("noise was drawn")


def agents(**changes: Any) -> DistributedGaussianSum:
    settings: dict[str, Any] = {"clip_norm": 3.0, "noise_multiplier": 1.0, "dropping": 1}
    return DistributedGaussianSum(**{"dim": DIM, "num_agents": 5, **settings, **changes})


def records(**changes: Any) -> DistributedRecordSum:
    settings: dict[str, Any] = {"num_features": 4, "outcome_bound": 1.0, "max_records": 9}
    return DistributedRecordSum(**{"num_agents": 5, "noise_multiplier": 2.0, **settings, **changes})


def trusted(**changes: Any) -> GaussianSum:
    settings: dict[str, Any] = {"clip_norm": 3.0, "noise_multiplier": 1.0, "weight": 1.0}
    return GaussianSum(**{"dim": DIM, "num_agents": 5, **settings, **changes})


def over(mechanism: Any, noise_at: Any, channel: Any = PlainChannel) -> PrivateSum:
    grid = getattr(mechanism, "grid", GRID)
    return PrivateSum(mechanism=mechanism, channel=channel(grid), noise_at=noise_at)


KINDS: dict[str, Callable[[], PrivateSum]] = {
    "agents": lambda: over(agents(), "agent"),
    "records": lambda: over(records(), "agent"),
    "server": lambda: over(trusted(), "server"),
    "agents' mechanism at the server": lambda: over(agents(), "server"),
    "records at the server": lambda: over(records(), "server"),
}
PAYING = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
AT_AGENTS = pytest.mark.parametrize("make", list(KINDS.values())[:2], ids=list(KINDS)[:2])


def vectors(scale: float = 1.0) -> dict[str, Tensor]:
    return {name: scale * generator(0, "v", name).normal(DIM) for name in NAMES}


def values_for(private_sum: PrivateSum) -> dict[str, Tensor]:
    if isinstance(private_sum.mechanism, DistributedRecordSum):
        return {name: generator(0, "r", name).normal(7, 5) for name in NAMES}
    return vectors()


def books(private_sum: PrivateSum, **changes: Any) -> Ledger:
    mechanism = private_sum.mechanism
    assert mechanism is not None
    return Ledger(**{"adjacency": mechanism.adjacency, "unit": mechanism.unit, **changes})


# ------------------------------------------------------------------ what goes together


@pytest.mark.parametrize("noise_at", ["agent", "server"])
def test_without_a_mechanism_nobody_adds_noise(noise_at: Any) -> None:
    with pytest.raises(InputDataError, match='noise_at="none"'):
        over(None, noise_at)
    with pytest.raises(InputDataError, match='noise_at="none"'):
        over(agents(), "none")
    with pytest.raises(InputDataError, match="noise_at must be one of"):
        over(agents(), "client")


@pytest.mark.parametrize("make", [agents, records, trusted])
def test_a_server_adds_no_noise_to_what_it_can_not_read(make: Any) -> None:
    with pytest.raises(InputDataError, match="can not read"):
        over(make(), "server", ThresholdCKKSChannel)
    with pytest.raises(InputDataError, match="can not read"):
        over(make(), "server", lambda grid: CKKSChannel.generate(grid)[0])


@pytest.mark.parametrize(
    ("mechanism", "noise_at", "match"),
    [
        (trusted(), "agent", "trusted server"),
        (trusted(weight=0.2), "server", "weight=1.0"),
        (trusted(dim=DIM + 1), "server", "same"),
        (trusted(num_agents=6), "server", "same"),
        (trusted(clip_norm=51.0), "server", "wider grid"),
        ("gaussian", "agent", "got str"),
    ],
)
def test_refuses_mechanisms_that_do_not_fit(mechanism: Any, noise_at: Any, match: str) -> None:
    with pytest.raises(InputDataError, match=match):
        over(mechanism, noise_at)


@pytest.mark.parametrize("other", [{"dim": 15}, {"bound": 60.0}, {"precision": 2.0**-30}])
def test_mechanism_and_channel_share_one_grid(other: dict[str, Any]) -> None:
    grid = PublicGrid(**{"dim": DIM, "bound": 50.0, "num_agents": 5, **other})
    with pytest.raises(InputDataError, match="same grid"):
        PrivateSum(mechanism=agents(grid=GRID), channel=PlainChannel(grid), noise_at="agent")


# ------------------------------------------------------------------ paying


@AT_AGENTS
@pytest.mark.parametrize("spoilt", [False, True])
def test_an_agent_pays_before_anything_is_computed(
    make: Any, spoilt: bool, tmp_path: FilePath
) -> None:
    private_sum = make()
    values = values_for(private_sum)["site-0"]

    class Watching:
        private = False

        def uniform(self, *shape: int, path: Path) -> Tensor:
            with SharedLedger(tmp_path / "ledger", unit=unit, budget=budget) as other:
                (entry,) = other.ledger.entries
            assert entry.event.discrete
            return SEEDED.uniform(*shape, path=path)

    unit, budget = private_sum.mechanism.unit, Budget(50.0, 1e-3)
    with SharedLedger(tmp_path / "ledger", unit=unit, budget=budget) as file:
        if spoilt:
            values[..., 2] = math.nan
            with pytest.raises(InputDataError, match="finite"):
                private_sum.contribute(values, ledger=file, noise=NoSource(), path=("a",))
        else:
            _, after = private_sum.contribute(values, ledger=file, noise=Watching(), path=("a",))
            assert after is file
        assert file.releases == 1


@PAYING
def test_beyond_the_budget_nothing_is_computed(make: Any) -> None:
    private_sum = make()
    ledger = books(private_sum, budget=Budget(1e-3, 1e-5))
    values = values_for(private_sum)
    with pytest.raises(BudgetExceeded):
        private_sum.run(values, ledger=ledger, noise=NoSource())
    if private_sum.noise_at == "agent":
        spoilt = torch.full((1,), math.nan)  # not even looked at
        with pytest.raises(BudgetExceeded):
            private_sum.contribute(spoilt, ledger=ledger, noise=NoSource(), path=())


@PAYING
def test_pays_its_event_once_per_sum(make: Any) -> None:
    private_sum = make()
    release = private_sum.run(values_for(private_sum), noise=SEEDED)
    again = private_sum.run(values_for(private_sum), ledger=release.ledger, noise=OSNoise())
    assert [entry.event for entry in again.ledger.entries] == [private_sum.mechanism.event] * 2
    assert again.ledger.releases == again.guarantee.releases == 2
    assert not release.guarantee.private
    assert not again.guarantee.private  # one of them was seeded
    assert private_sum.run(values_for(private_sum)).guarantee.private


@PAYING
@pytest.mark.parametrize("other", [{"adjacency": "replace-one"}, {"unit": None}])
def test_refuses_a_ledger_of_another_kind(make: Any, other: dict[str, Any]) -> None:
    private_sum = make()
    if "unit" in other:
        other = {"unit": "record" if private_sum.mechanism.unit == "agent" else "agent"}
    with pytest.raises(InputDataError, match="give both the same"):
        private_sum.run(
            values_for(private_sum), ledger=books(private_sum, **other), noise=NoSource()
        )


@AT_AGENTS
def test_noise_needs_a_ledger(make: Any) -> None:
    private_sum = make()
    with pytest.raises(InputDataError, match="ledger"):
        private_sum.contribute(torch.zeros(1), ledger=None, noise=NoSource(), path=())


# ------------------------------------------------------------------ sums


def test_without_noise_it_is_the_sum_on_the_grid_and_says_so() -> None:
    release = over(None, "none").run(vectors(), noise=NoSource())
    expected = sum(GRID.to_values(GRID.to_integers(v)) for v in vectors().values())
    assert torch.equal(release.values, expected)
    assert release.guarantee is None
    assert release.ledger is None
    assert release.noise_std == 0
    assert "no privacy guarantee: encryption hides contributions, not their sum" in repr(release)
    with pytest.raises(InputDataError, match="bound"):
        over(None, "none").run({"a": torch.full((DIM,), 51.0).double()})


@AT_AGENTS
def test_run_is_what_agents_and_channel_do_one_by_one(make: Any) -> None:
    private_sum, total = make(), torch.zeros(DIM, dtype=torch.int64)
    for name, values in values_for(private_sum).items():
        integers, ledger = private_sum.contribute(
            values, ledger=books(private_sum), noise=SEEDED, path=("t", 1, name)
        )
        assert ledger.releases == 1
        total += integers
    release = private_sum.run(values_for(private_sum), noise=SEEDED, path=("t", 1))
    assert torch.equal(release.values, private_sum.channel.grid.to_values(total))
    other = private_sum.run(values_for(private_sum), noise=SEEDED, path=("t", 2))
    assert not torch.equal(other.values, release.values)


@PAYING
def test_noise_around_the_clipped_sum_is_the_stated(make: Any) -> None:
    private_sum = make()
    values = values_for(private_sum)
    clean = sum(
        private_sum.channel.grid.to_values(private_sum._bounded(v)) for v in values.values()
    )
    runs = [private_sum.run(values, noise=SEEDED, path=(t,)) for t in range(150)]
    errors = torch.stack([run.values for run in runs]) - clean
    stated = runs[0].noise_std
    assert float(errors.std()) == pytest.approx(stated, rel=5 / math.sqrt(2 * errors.numel()))
    assert float(errors.mean().abs()) < 5 * stated / math.sqrt(errors.numel())
    if private_sum.noise_at == "server" and not isinstance(private_sum.mechanism, GaussianSum):
        assert stated == private_sum.mechanism.noise_scale


@AT_AGENTS
def test_agents_draw_noise_of_their_own(make: Any) -> None:
    private_sum = make()
    mechanism = private_sum.mechanism
    drawn = [mechanism.share_of_noise(noise=SEEDED, path=("t", name)) for name in NAMES]
    assert len({tuple(share.tolist()) for share in drawn}) == len(NAMES)


def test_a_trusted_server_clips_what_agents_did_not() -> None:
    private_sum, epoch = over(trusted(noise_multiplier=0.01), "server"), Epoch("r", 0, NAMES)
    channel = private_sum.channel
    unclipped = channel.grid.to_integers(torch.full((DIM,), 40.0).double())
    payload = channel.protect(
        unclipped, epoch=epoch, round=0, me="site-3", key=b"", secrets=MemoryStore()
    )
    values, ledger = private_sum.release(
        {"site-3": payload}, epoch=epoch, round=0, ledger=Ledger(), noise=SEEDED, path=()
    )
    assert float(values.norm()) == pytest.approx(3.0, abs=0.5)
    assert ledger.releases == 1
    with pytest.raises(ProtocolError, match="no noise"):
        over(agents(), "agent").release(
            {}, epoch=epoch, round=0, ledger=Ledger(), noise=NoSource(), path=()
        )


def test_a_trusted_server_may_sample() -> None:
    private_sum = over(trusted(sampling=PoissonSampling(0.5)), "server")
    release = private_sum.run(vectors(), noise=SEEDED)
    assert [entry.event for entry in release.ledger.entries] == [Event(1.0, 0.5)]


def test_as_many_may_be_missing_as_the_settings_say() -> None:
    values = vectors()
    del values["site-4"]
    release = over(agents(), "agent").run(values, noise=SEEDED)
    assert release.num_agents == 4
    assert release.noise_std == pytest.approx(2 * agents().agent_std)
    assert release.noise_std > agents().noise_scale
    del values["site-3"]
    with pytest.raises(ProtocolError, match="3 agents contribute"):
        over(agents(), "agent").run(values, noise=NoSource())
    with pytest.raises(ProtocolError, match="6 agents contribute"):
        over(agents(), "agent").run({**vectors(), "site-9": torch.zeros(DIM)}, noise=NoSource())
    with pytest.raises(ProtocolError, match="0 agents contribute"):
        over(None, "none").run({})


def test_shapes_are_checked() -> None:
    for private_sum in (over(agents(), "agent"), over(None, "none")):
        with pytest.raises(BotorchTensorDimensionError):
            private_sum.run({name: torch.zeros(DIM + 1).double() for name in NAMES})


# ------------------------------------------------------------------ every channel


@pytest.mark.parametrize(
    "mechanism", [None, agents(), records()], ids=["none", "agents", "records"]
)
def test_every_channel_gives_the_same_sum(mechanism: Any) -> None:
    noise_at = "none" if mechanism is None else "agent"
    plain = over(mechanism, noise_at)
    values = values_for(plain)
    expected = plain.run(values, noise=SEEDED)
    single, secret = CKKSChannel.generate(plain.channel.grid)
    stores = {name: MemoryStore() for name in NAMES}
    for store in stores.values():
        single.provision(secret, store)
    others: list[tuple[Channel, Any]] = [
        (single, stores),
        (ThresholdCKKSChannel(plain.channel.grid), None),
    ]
    words = {expected.learned_by}
    for channel, secrets in others:
        private_sum = PrivateSum(mechanism=mechanism, channel=channel, noise_at=noise_at)
        release = private_sum.run(values, noise=SEEDED, secrets=secrets)
        assert torch.equal(release.values, expected.values)
        assert release.guarantee == expected.guarantee
        assert release.bytes_per_agent > expected.bytes_per_agent
        words.add(release.learned_by)
    assert len(words) == 3  # each says who learns what


def test_a_release_says_who_learns_what_and_no_values() -> None:
    release = over(agents(), "agent").run(vectors(), noise=SEEDED)
    words = repr(release)
    for expected in (
        "14 numbers from 5 agents",
        f"{release.bytes_per_agent} bytes",
        "with its own share of noise only",
        "not private: seeded noise",
        "per agent, zero-out, 1 releases",
    ):
        assert expected in words
    for value in release.values.tolist():
        assert f"{value:.4f}" not in words
    assert release.seconds > 0
