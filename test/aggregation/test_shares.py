"""DP-FTS-DE without a trusted server: what the agents' noise is, who pays, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import SoftmaxSchedule
from botorch_fed.aggregation.noisy import NoisySum, default_delta
from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.sum_messages import Opened, SumMemory, Upload
from botorch_fed.errors import ProtocolError
from botorch_fed.privacy import (
    Budget,
    DistributedGaussianSum,
    PoissonSampling,
    SharedLedger,
    SignalWarning,
)
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.run import RunResult, run
from botorch_fed.search.noisy import MIN_RELIABILITY
from botorch_fed.search.released import Following
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS
from botorch_fed.studies import Federation as Parts
from test.aggregation.harness import HILLS, NAMES, SQUARE, Federation, trace

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

GAIN = Following(follow=2, num_raw=64, num_restarts=4, num_features=64)
MANY = tuple(f"agent{n:02d}" for n in range(40))
CHANNELS = ("plain", "ckks", "threshold")


def study(**settings: Any) -> DPFTSDE:
    given: dict[str, Any] = {
        "budget": 6,
        "num_initial": 3,
        "noise_multiplier": 0.5,
        "releases": (0, 2),
        "min_reliability": 0.0,
        "trust": "distributed",
        "noise": InsecureSeededNoise(3),
        **settings,
    }
    return DPFTSDE(**given)


def ran(made: Any, **options: Any) -> RunResult:
    result = run(made, HILLS, space=SQUARE, seed=1, progress=False, **options)
    assert {row["failure"] for row in result.rounds} == {None}
    return result


def mechanism_of(made: DPFTSDE, names: tuple[str, ...] = NAMES) -> DistributedGaussianSum:
    terms = made.terms(SQUARE, names)
    assert isinstance(terms.aggregation, SecureSum)
    found = terms.aggregation.mechanism_for(terms)
    assert isinstance(found, DistributedGaussianSum)
    return found


# ------------------------------------------------------------------ the noise


@pytest.mark.parametrize(("colluding", "dropping"), [(0, 0), (1, 0), (3, 2)])
def test_the_sum_of_all_shares_has_the_promised_variance(colluding: int, dropping: int) -> None:
    """As sites draw it: of zero messages, which leave the noise alone."""
    names = MANY[:10]
    made = study(noise=OSNoise(), colluding=colluding, dropping=dropping, channel="plain")
    mechanism, server = mechanism_of(made, names), made.server(SQUARE, names)
    private_sum = server.terms.aggregation.private_sum(server.hub)  # type: ignore[attr-defined]
    sums, honest = [], []
    for round_ in range(150):
        drawn = []
        for name in names:
            site = made.site_resources(name)
            integers, _ = private_sum.contribute(
                torch.zeros(mechanism.dim, dtype=torch.float64),
                ledger=site.ledger,
                noise=site.noise,
                path=("contribution", round_, 0, name),
            )
            drawn.append(mechanism.grid.to_values(integers))
        sums.append(sum(drawn))
        honest.append(sum(drawn[: mechanism.honest]))  # the others subtract theirs, or are missing
    assert mechanism.honest == 10 - colluding - dropping
    count = 150 * mechanism.dim
    slack = 5 * math.sqrt(2 / count)  # of a variance of normal numbers
    for found, expected in ((sums, mechanism.noise_std), (honest, mechanism.noise_scale)):
        variance = float(torch.stack(found).square().mean())  # type: ignore[arg-type]
        assert variance == pytest.approx(expected**2, rel=slack)
    assert mechanism.noise_scale == pytest.approx(0.5 * mechanism.clip_norm, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("colluding", [0, 1, 10])
def test_what_doing_without_a_trusted_server_costs(epsilon: float, colluding: int) -> None:
    r"""At the same epsilon: sqrt(N / (N - c)), and the difference of two accountants."""
    common: dict[str, Any] = {"epsilon": epsilon, "noise_multiplier": None, "delta": 1e-5}
    made = study(**common, colluding=colluding)
    central = DPFTSDE(**{**_settings(made), "trust": "central", "colluding": 1})
    terms = central.terms(SQUARE, MANY)
    assert isinstance(terms.aggregation, NoisySum)
    plan = terms.aggregation.plan(terms)
    trusted = float(plan.mechanism(0).noise_std[0])  # of a mean
    ratio = mechanism_of(made, MANY).noise_std / len(MANY) / trusted
    shares = math.sqrt(len(MANY) / (len(MANY) - colluding))
    assert shares <= ratio <= 1.1 * shares
    one, other = made.price(SQUARE, MANY), central.price(SQUARE, MANY)
    assert one is not None
    assert other is not None
    assert max(one.epsilon, other.epsilon) <= epsilon
    assert min(one.epsilon, other.epsilon) >= 0.99 * epsilon
    assert (one.delta, one.unit, one.adjacency) == (other.delta, other.unit, other.adjacency)
    assert (one.paid_at, other.paid_at) == ("site", "hub")


def _settings(made: DPFTSDE) -> dict[str, Any]:
    return {k: v for k, v in vars(made).items() if k != "_made"}


def test_delta_follows_from_the_number_of_agents() -> None:
    price = study(epsilon=2.0, noise_multiplier=None).price(SQUARE, MANY)
    assert price is not None
    assert price.delta == default_delta(40)
    assert price.epsilon <= 2.0


def test_noise_is_for_the_releases_that_there_are() -> None:
    """As with a trusted server: what would come after the last round costs nothing."""
    short, long = (
        study(epsilon=5.0, noise_multiplier=None, budget=4),
        study(epsilon=5.0, noise_multiplier=None),
    )
    assert mechanism_of(short).noise_multiplier < mechanism_of(long).noise_multiplier
    prices = [made.price(SQUARE, NAMES) for made in (short, long)]
    assert [price.payments for price in prices if price is not None] == [1, 2]


# ------------------------------------------------------------------ who pays, and when


@pytest.mark.parametrize("channel", ["plain", "threshold"])
def test_every_site_pays_before_the_sum_is_made(channel: Any) -> None:
    federation = Federation(study(channel=channel))
    paid: list[dict[str, int]] = []

    def watch(state: Any, inbox: Any) -> None:
        if any(isinstance(reply, Upload) and reply.data is not None for reply in inbox.values()):
            paid.append({name: federation.releases(name) for name in NAMES})
            assert state.sums == len(paid) - 1

    federation.server.watch = watch
    federation.drive()
    assert paid == [dict.fromkeys(NAMES, 1), dict.fromkeys(NAMES, 2)]
    ledgers = [federation.memory(name).ledger for name in NAMES]
    price = federation.server.honest.price
    for ledger in ledgers:
        assert ledger is not None
        assert price.spent(ledger).epsilon == price.epsilon
    assert federation.end.ledger is not None
    assert federation.end.ledger.releases == 0  # the hub's


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_paid_stays_paid_after_a_crash(tmp_path: Path, lost: bool) -> None:
    calls = 0

    def stopped(name: str, serial: int) -> bool:
        nonlocal calls
        calls += 1
        if calls > len(NAMES) * 5:  # three for the key, the start, and then a share
            raise RuntimeError("the plug")
        return False

    with pytest.raises(RuntimeError, match="the plug"):
        ran(study(), out=tmp_path / "run", absent=stopped)
    kept = list((tmp_path / "run" / "sites").glob("*/secrets/he-*"))
    assert kept  # each site's part of the joint key
    for secret in kept if lost else ():
        secret.unlink()
    again = ran(study(), out=tmp_path / "run", resume=True)
    assert again.privacy is not None
    # The second sum was paid and cannot be opened without keys: a third one is not in the promise.
    assert (again.privacy["sums"], again.privacy["releases"]) == (2 - lost, 2)
    if not lost:
        assert trace(again) == trace(ran(study()))


def test_a_site_that_cannot_pay_does_not_contribute() -> None:
    one = study(releases=(0,)).price(SQUARE, NAMES)
    assert one is not None
    poor = Budget(1.01 * one.epsilon, one.delta)
    made = study(dropping=1, channel="plain")
    ledgers = {"bob": replace(_ledger(made, "bob"), budget=poor)}
    federation = Federation(made, ledgers=ledgers)
    federation.drive()
    assert federation.codes("bob") == {"budget"}
    assert federation.releases("bob") == 1
    assert federation.end.sums == 2  # the others have noise enough


def _ledger(made: DPFTSDE, name: str) -> Any:
    return made.site_resources(name).ledger


def test_a_site_keeps_a_budget_of_its_own() -> None:
    epsilon = {"epsilon": 3.0, "noise_multiplier": None}
    assert _ledger(study(**epsilon, delta=1e-4), "ann").budget == Budget(3.0, 1e-4)
    assert _ledger(study(**epsilon, require=Budget(4.0, 1e-4)), "ann").budget == Budget(4.0, 1e-4)
    assert _ledger(study(), "ann").budget is None
    assert _ledger(replace(study(), adjacency="replace-one"), "ann").adjacency == "replace-one"


def test_a_site_requires_what_its_noise_gives() -> None:
    made = study(noise=OSNoise())
    promise = made.server(SQUARE, NAMES).promise
    assert promise is not None
    assert promise.private
    enough = Federation(replace(made, require=Budget(promise.epsilon, promise.delta)))
    enough.drive()
    assert enough.end.sums == 2
    with pytest.raises(ProtocolError, match="refuse to begin"):
        Federation(replace(made, require=Budget(0.99 * promise.epsilon, promise.delta))).drive()


# ------------------------------------------------------------------ what a run is


@pytest.mark.parametrize("strategy", [None, GAIN], ids=["own mean", "gain"])
def test_every_channel_gives_the_same_run(strategy: Any) -> None:
    settings = {} if strategy is None else {"strategy": strategy}
    channels: list[dict[str, Any]] = [{"channel": channel} for channel in (*CHANNELS, None)]
    channels.append({"opened_by": "server"})
    results = [ran(study(**channel, **settings)) for channel in channels]
    assert len({trace(result) for result in results}) == 1
    for result, channel in zip(results, channels, strict=True):
        privacy = result.privacy
        assert privacy is not None
        assert (privacy["sums"], privacy["releases"], privacy["paid_at"]) == (2, 2, "site")
        assert privacy["mechanism"] == "DistributedGaussianSum"
        read = channel in ({"channel": "plain"}, {"opened_by": "server"})  # by the hub
        assert len(privacy.get("signal_to_noise", ())) == (2 if read else 0)
        assert json.loads(json.dumps(privacy)) == privacy


def test_a_copy_is_the_same_study() -> None:
    copy = pickle.loads(pickle.dumps(study()))
    assert trace(ran(copy)) == trace(ran(study()))


def test_the_study_is_its_two_parts() -> None:
    made = study()
    parts = Parts(
        budget=6,
        num_initial=3,
        search=made.make_search(),
        feature_map=made.make_basis(SQUARE),
        aggregation=SecureSum(noise_multiplier=0.5, releases=(0, 2), delta=None),
    )
    assert parts.price(SQUARE, NAMES) == replace(made, noise=OSNoise()).price(SQUARE, NAMES)
    assert parts.sees(SQUARE, NAMES) == made.sees(SQUARE, NAMES)


def test_parts_keep_their_keys_across_a_crash(tmp_path: Path) -> None:
    """Any federation with a sum has stores for its keys."""
    parts = Parts(
        budget=6,
        num_initial=3,
        search=study().make_search(),
        feature_map=study().make_basis(SQUARE),
        aggregation=SecureSum(channel="ckks", releases=(0, 2)),
    )
    result = ran(parts, out=tmp_path / "run")
    assert result.privacy is not None
    assert result.privacy["sums"] == 2
    assert len(list((tmp_path / "run").glob("sites/*/secrets/*"))) >= 3
    ran(FTS(budget=3), out=tmp_path / "fts")
    assert not list((tmp_path / "fts").glob("sites/*/secrets"))


def test_parties_of_their_own_processes_agree() -> None:
    """A site that knows no roster makes the terms, and the noise, of the hub."""
    hub = study(epsilon=20.0, noise_multiplier=None).server(SQUARE, NAMES)
    made = study(epsilon=20.0, noise_multiplier=None)
    for name in NAMES:
        agent = made.agent(name, SQUARE, 7, MemoryBlobs())
        terms = agent.terms.agreed(hub.hub.terms.setup, agent.terms.basis)
        assert terms.promise == hub.promise
        aggregation = terms.aggregation
        assert isinstance(aggregation, SecureSum)
        expected = hub.terms.aggregation
        assert isinstance(expected, SecureSum)
        assert aggregation.mechanism_for(terms) == expected.mechanism_for(hub.terms)


@pytest.mark.parametrize(
    ("channel", "dropping", "sums"),
    # Under a joint key the sum that is interrupted is drawn, and paid, again without the lost one.
    [("plain", 0, 1), ("plain", 1, 3), ("threshold", 0, 1), ("threshold", 1, 2)],
)
def test_who_is_lost_is_missed_as_far_as_planned(channel: Any, dropping: int, sums: int) -> None:
    federation = Federation(
        study(channel=channel, dropping=dropping, rejoin=False, releases=(0, 2, 3), budget=7),
        absent=lambda name, order: name == "bob" and order.t >= 1,
    )
    federation.drive()
    assert federation.end.sums == sums
    assert federation.releases("ann") <= 3
    assert federation.counts() == {"ann": 7, "bob": 3, "cem": 7}


def test_a_sum_is_of_clipped_messages_and_noise() -> None:
    common: dict[str, Any] = {"releases": (0,), "opened_by": "server"}
    quiet = Federation(study(noise_kind="none", noise_multiplier=None, **common))
    noisy = Federation(study(**common))
    totals = []
    for federation in (quiet, noisy):
        federation.drive()
        assert isinstance(federation.end.last, Opened)
        totals.append(federation.end.last.total)
    memory: SumMemory = noisy.memory("ann")
    assert memory.newest is not None
    made = mechanism_of(study(releases=(0,)))
    assert memory.newest.noise_std == made.noise_std
    gap = float((totals[1] - totals[0]).norm()) / (made.noise_std * math.sqrt(made.dim))
    assert 0.3 < gap < 2.5  # of chi's distribution with seven degrees: one in a million


# ------------------------------------------------------------------ before anything is spent


def test_a_federation_that_would_follow_noise_spends_nothing() -> None:
    quiet = study(epsilon=1.0, noise_multiplier=None, min_reliability=MIN_RELIABILITY)
    with pytest.warns(SignalWarning, match="nothing is released and nothing spent"):
        federation = Federation(quiet)
    federation.drive()
    server = federation.server.honest
    assert "That is below 20%" in server.signal_words
    assert (server.price.releases, server.price.epsilon, server.price.mechanism) == (0, 0.0, "none")
    assert federation.end.sums == federation.end.asked == federation.end.epoch == 0
    assert all(federation.releases(name) == 0 for name in NAMES)
    assert set(federation.counts().values()) == {6}
    assert "No sum is opened" in server.sees.trust
    alone = ran(quiet.alone())
    assert trace(ran(quiet)) == trace(alone)


def test_a_federation_with_enough_agents_says_how_much() -> None:
    made = study(epsilon=8.0, noise_multiplier=None, min_reliability=MIN_RELIABILITY)
    server = made.server(SQUARE, MANY)
    assert server.signal_words.startswith("With 40 agents and")
    terms = server.terms
    assert isinstance(terms.aggregation, SecureSum)
    forecast = terms.aggregation.forecast(terms)
    assert forecast is not None
    mechanism = mechanism_of(made, MANY)
    assert forecast.outlook.ratio(1.0) == pytest.approx(mechanism.best_signal_to_noise, rel=1e-6)


def test_gains_that_are_all_noise_are_warned_of() -> None:
    made = study(strategy=GAIN, noise_multiplier=50.0)
    with pytest.warns(SignalWarning, match="times as much signal as noise"):
        made.server(SQUARE, NAMES)


@pytest.mark.parametrize("colluding", [0, 1, 2])
def test_who_is_trusted_is_said(colluding: int) -> None:
    sees = study(colluding=colluding).sees(SQUARE, NAMES)
    against = ("outsiders", "any other agent", "any 2 other agents together")[colluding]
    assert sees.trust == (
        "The server is trusted with neither contributions nor sums, whatever it does, as long as "
        "the transport tells agents' names right; agents add the noise, and the guarantee is "
        f"against the server and {against}."
    )
    assert sees.row("Upload").readers == ()
    assert (sees.row("Sealed").readers, sees.row("Sealed").reveals) == (("agents",), "noisy data")
    plain = study(channel="plain").sees(SQUARE, NAMES)
    assert plain.row("Upload").readers == ("server",)
    assert "with its own share of the noise only" in plain.row("Upload").content


# ------------------------------------------------------------------ what does not go together

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trust": "nobody"}, "trust is one of"),
    ({"sampling": PoissonSampling(0.5)}, "nobody knows who is in it"),
    ({"num_regions": 2, "strategy": GAIN}, "weighs each message by its agent's region"),
    ({"exploration": SoftmaxSchedule(2.0), "strategy": GAIN}, "weighs each message"),
    ({"noise_kind": "tight"}, "one kind of noise"),
    ({"noise_kind": "paper"}, "one kind of noise"),
    ({"trim": 1, "noise_kind": "none", "noise_multiplier": None}, "compares single messages"),
    ({"switch_to_local_after": 2}, "keeps the newest sum"),
    ({"noise_kind": "none"}, 'noise_kind="none" and neither'),
    ({"noise_multiplier": None}, "needs epsilon or noise_multiplier"),
    ({"epsilon": 1.0}, "each follows from the other"),
    ({"channel": "post"}, "channel is one of"),
    ({"trust": "central", "channel": "plain"}, "reads every message"),
    ({"trust": "central", "colluding": 2}, "adds all the noise"),
    ({"trust": "central", "dropping": 2}, "adds all the noise"),
    ({"trust": "central", "opened_by": "server"}, "makes the releases"),
    ({"trust": "central", "identities": {"ann": "0" * 64}}, "there is no joint key"),
    ({"trust": "central", "min_agents": 2}, "there is no joint key"),
]


@pytest.mark.parametrize(("settings", "why"), REFUSED, ids=range(len(REFUSED)))
def test_settings_of_the_other_trust_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why):
        study(**settings)


def test_a_ledger_of_the_hub_is_refused(tmp_path: Path) -> None:
    with (
        SharedLedger(tmp_path / "ledger", budget=Budget(9.0, 1e-5)) as books,
        pytest.raises(InputDataError, match="shared_ledger goes with trust='central' only"),
    ):
        study(shared_ledger=books)


def test_noise_that_needs_more_agents_is_refused() -> None:
    with pytest.raises(InputDataError, match="nobody is left to add noise"):
        study(colluding=3).server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="A joint key needs two agents"):
        study(colluding=0).server(SQUARE, NAMES[:1])


def test_noise_of_an_aggregation_is_given_once() -> None:
    with pytest.raises(InputDataError, match="Give a mechanism, or epsilon"):
        SecureSum(epsilon=1.0, mechanism=lambda dim, count: None, noise_at="agent", releases=(0,))
    with pytest.raises(InputDataError, match="The agents add the noise"):
        SecureSum(epsilon=1.0, noise_at="server", releases=(0,), channel="plain")
    with pytest.raises(InputDataError, match="most sums of the whole run"):
        SecureSum(epsilon=1.0)
