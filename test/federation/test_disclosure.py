"""Who sees what is what travels, and a price is the promise that sites are given."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from botorch.exceptions.errors import InputDataError

from botorch_fed.aggregation.sum_messages import Upload
from botorch_fed.errors import MessageError, ProtocolError
from botorch_fed.federation import base
from botorch_fed.federation.base import Outbox
from botorch_fed.federation.disclosure import (
    FRAMES,
    NO_GUARANTEE,
    Price,
    Row,
    Sees,
    disclosed,
    entries_of,
    first_payments,
)
from botorch_fed.privacy import (
    Budget,
    DistributedGaussianSum,
    Entry,
    Event,
    GaussianSum,
    InsecureSeededNoise,
    Ledger,
    PoissonSampling,
)
from botorch_fed.privacy.aggregation import PrivateSum
from botorch_fed.privacy.channels import Epoch
from botorch_fed.run import RunResult, run
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from botorch_fed.wire.codec import decode
from test.federation.dp import plan_of
from test.federation.wire import NAMES, SPACE, Recorded, bowl, recorded, refused

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
QUICK: dict[str, Any] = {"support_size": 4, "num_raw": 32, "num_restarts": 2, "noise_var": 1e-2}
FOLLOWING = Following(num_raw=32, num_restarts=2)
NOISY: dict[str, Any] = {"search": SupportSearch(**QUICK), "budget": 5, "num_initial": 2}


def distributed(dim: int, num_agents: int) -> DistributedGaussianSum:
    return DistributedGaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=2.0
    )


def central(dim: int, num_agents: int) -> GaussianSum:
    return GaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=2.0, weight=1.0
    )


STUDIES: dict[str, Callable[[], Any]] = {
    "fts": lambda: FTS(budget=5),
    "fts, summaries": lambda: FTS(
        budget=5,
        message="summary_and_incumbent",
        strategy=Strategy(transfer="taf", num_raw=32, num_restarts=2),
        every=1,
        num_initial=2,
    ),
    "dp-fts-de": lambda: DPFTSDE(budget=6, epsilon=50.0, delta=1e-3),
    "dp-fts-de, regions": lambda: DPFTSDE(
        budget=5,
        num_initial=2,
        noise_multiplier=1.0,
        num_regions=2,
        strategy=FOLLOWING,
        sampling=PoissonSampling(0.5),
    ),
    "dp-fts-de, as published": lambda: DPFTSDE(
        budget=5,
        num_initial=2,
        noise_multiplier=1.0,
        noise_kind="paper",
        message="mean",
        strategy=FOLLOWING,
    ),
    "dp-fts-de, nothing released": lambda: DPFTSDE(budget=5, epsilon=0.1, delta=1e-3),
    "dp-fts-de, no noise": lambda: DPFTSDE(budget=6, noise_kind="none"),
    "dp-fts-de, distributed": lambda: DPFTSDE(
        budget=6, epsilon=80.0, delta=1e-3, trust="distributed"
    ),
    "dp-fts-de, distributed, ckks": lambda: DPFTSDE(
        budget=6, epsilon=80.0, delta=1e-3, trust="distributed", channel="ckks"
    ),
    "dp-fts-de, distributed, gains": lambda: DPFTSDE(
        budget=5,
        num_initial=2,
        noise_multiplier=0.5,
        strategy=FOLLOWING,
        trust="distributed",
        channel="plain",
    ),
    "dp-fts-de, distributed, nothing released": lambda: DPFTSDE(
        budget=5, epsilon=0.1, delta=1e-3, trust="distributed"
    ),
    "dp-fts-de, distributed, no noise": lambda: DPFTSDE(
        budget=5, noise_kind="none", trust="distributed"
    ),
    "fed-gp, plain": lambda: FedGP(budget=5, channel="plain"),
    "fed-gp, ckks": lambda: FedGP(budget=5, channel="ckks"),
    "fed-gp, threshold": lambda: FedGP(budget=5, channel="threshold"),
    "fed-gp, region": lambda: FedGP(
        budget=5, num_initial=2, channel="plain", search=RegionSearch(num_inducing=4)
    ),
    "fed-gp, agents' noise, plain": lambda: FedGP(
        **NOISY, channel="plain", mechanism=distributed, noise_at="agent"
    ),
    "fed-gp, agents' noise, ckks": lambda: FedGP(
        **NOISY, channel="ckks", mechanism=distributed, noise_at="agent"
    ),
    "fed-gp, agents' noise, threshold": lambda: FedGP(
        **NOISY, channel="threshold", mechanism=distributed, noise_at="agent"
    ),
    "fed-gp, server's noise": lambda: FedGP(
        **NOISY, channel="plain", mechanism=central, noise_at="server"
    ),
    "private-ucb, joint": lambda: PrivateUCB(budget=4, epsilon=5.0),
    "private-ucb, joint, agents": lambda: PrivateUCB(budget=4, epsilon=5.0, unit="agent"),
    "private-ucb, local": lambda: PrivateUCB(budget=4, epsilon=5.0, trust="local"),
    "private-ucb, local, agents": lambda: PrivateUCB(
        budget=4, epsilon=5.0, trust="local", unit="agent"
    ),
    "private-ucb, public": lambda: PrivateUCB(budget=40, epsilon=5.0, trust="public"),
    "private-ucb, none": lambda: PrivateUCB(budget=4, trust="none"),
}
PRICED = [
    name for name in STUDIES if name.split(", ")[-1] not in ("fts", "summaries", "no noise", "none")
]
PRICED = [
    name
    for name in PRICED
    if not name.startswith("fed-gp") or "noise" in name  # without a mechanism nothing is paid
]


@cache
def finished(name: str) -> Recorded:
    return recorded(STUDIES[name]())


def private_sum(server: Any) -> PrivateSum:
    """What bounds, noises and carries contributions."""
    found: PrivateSum | None = server.terms.aggregation.private_sum(server.hub)
    assert found is not None
    return found


def sees_of(name: str) -> Sees:
    found: Sees = STUDIES[name]().sees(SPACE, NAMES)
    return found


def price_of(name: str) -> Price:
    found = STUDIES[name]().price(SPACE, NAMES)
    assert isinstance(found, Price)
    return found


# ------------------------------------------------------------------ rows are what travels


@pytest.mark.parametrize("name", STUDIES)
def test_rows_are_the_messages_that_travel(name: str) -> None:
    sees = sees_of(name)
    assert {(row.sender, row.message) for row in sees.rows} == finished(name).wire.messages


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_broadcast_is_for_all_agents(name: str) -> None:
    sees, wire = sees_of(name), finished(name).wire
    for row in sees.rows:
        to_all = row.message in wire.broadcast
        if to_all:
            assert "agents" in row.readers or not row.readers
            assert "agent" not in row.readers
        assert row.sender == "server" or not to_all
        assert row.sender == "server" or set(row.readers) <= {"server"}


@pytest.mark.parametrize("name", STUDIES)
def test_the_server_knows_the_agents_messages_that_have_a_row(name: str) -> None:
    accepted = {kind.__name__ for kind in finished(name).server.accepts}
    assert {row.message for row in sees_of(name).rows if row.sender == "agent"} <= accepted


@pytest.mark.parametrize("name", STUDIES)
def test_agents_read_noisy_data_exactly_where_there_is_a_price(name: str) -> None:
    sees, price = sees_of(name), STUDIES[name]().price(SPACE, NAMES)
    revealed = {row.reveals for row in sees.read_by("agents")}
    if price is None:
        assert revealed == {"data"}
        assert NO_GUARANTEE in sees.sentences
    else:
        assert revealed == ({"noisy data"} if price.releases else set())
        assert NO_GUARANTEE not in sees.sentences
    assert sees.noisy == (price is not None and price.releases > 0)


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith("fed-gp")])
def test_the_server_reads_contributions_as_the_channel_shows_them(name: str) -> None:
    found, sees = finished(name), sees_of(name)
    channel = private_sum(found.server).channel
    uploads = [decode(data, Upload).data for data in found.wire.sent["agent", "Upload"]]
    readable = [_opens_alone(channel, data) for data in uploads if data is not None]
    assert readable
    assert set(readable) == {"server" in sees.row("Upload").readers}
    assert sees.encrypted == (not any(readable))


def _opens_alone(channel: Any, data: bytes) -> bool:
    """Whether who has no key makes numbers of one contribution."""
    epoch = Epoch("run", 0, NAMES)
    for sender, number in itertools.product(NAMES, range(6)):
        try:
            total = channel.add({sender: data}, epoch=epoch, round=number)
            found = channel.open(total, {}, epoch=epoch, round=number)
        except (MessageError, ProtocolError, InputDataError):
            continue
        return bool(found.shape == (channel.grid.dim,))
    return False


def test_the_frames_are_those_of_all_protocols() -> None:
    wire = finished("fts").wire
    frames = {(row.sender, row.message) for row in FRAMES}
    assert set(wire.sent) - wire.messages <= frames
    assert all(hasattr(base, row.message) for row in FRAMES)


@dataclass(frozen=True)
class Gossip:
    """A broadcast that no row lists."""

    words: str


class Telling:
    """A server that broadcasts what its rows do not list."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def outbox(self, state: Any) -> Outbox | None:
        box = self.inner.outbox(state)
        return box and replace(box, broadcasts=(*box.broadcasts, Gossip("north leads")))


def test_an_unlisted_message_is_found() -> None:
    study = FTS(budget=3)
    wire = refused(study, Telling(study.server(SPACE, NAMES)))
    rows = {(row.sender, row.message) for row in study.sees(SPACE, NAMES).rows}
    assert wire.messages - rows == {("server", "Gossip")}


# ------------------------------------------------------------------ a price is the promise


@pytest.mark.parametrize("name", PRICED)
def test_a_price_is_the_promise_of_the_server_and_of_its_setup(name: str) -> None:
    price, found = price_of(name), finished(name)
    assert price.guarantee == found.server.promise
    assert price == found.server.price
    server = found.server
    kind = type(server.setup if hasattr(server, "setup") else server.terms.setup)
    travelled = decode(found.wire.sent["server", "Setup"][0], kind)
    assert travelled.promise == price.guarantee
    assert price.trust == sees_of(name).trust


@pytest.mark.parametrize("name", [n for n in STUDIES if n not in PRICED])
def test_no_promise_no_price(name: str) -> None:
    assert STUDIES[name]().price(SPACE, NAMES) is None
    assert getattr(finished(name).server, "promise", None) is None


@pytest.mark.parametrize("name", [n for n in PRICED if "nothing released" not in n])
def test_a_site_requires_what_the_price_says(name: str) -> None:
    study, price = STUDIES[name](), price_of(name)
    enough = Budget(price.epsilon, price.delta)
    assert not recorded(replace(study, require=enough)).wire.refusals
    tight = Budget(math.nextafter(price.epsilon, 0), price.delta)
    wire = refused(replace(study, require=tight))
    assert wire.refusals == ["invalid"] * len(NAMES)
    assert ("agent", "Reply") not in wire.sent


@pytest.mark.parametrize("name", PRICED)
def test_what_a_whole_run_spends_is_what_was_planned(name: str) -> None:
    price, found = price_of(name), finished(name)
    paid = found.server.paid(found.end)
    spent = price.spent(paid)
    assert spent == price.guarantee
    assert sum(entry.count for entry in paid) == price.payments == spent.releases
    assert price.spent(Ledger(price.adjacency, price.unit, None, paid)) == spent
    account = found.server.privacy(found.end)
    assert entries_of(account) == tuple(replace(entry, note="") for entry in paid)
    assert (account["epsilon"], account["promised_epsilon"]) == (spent.epsilon, price.epsilon)
    assert (account["mechanism"], account["paid_at"]) == (price.mechanism, price.paid_at)
    assert json.loads(json.dumps(account)) == account
    assert found.server.privacy(found.server.start())["epsilon"] == 0


@pytest.mark.parametrize("name", PRICED)
def test_who_pays_is_who_has_the_ledger(name: str) -> None:
    price, found = price_of(name), finished(name)
    hub = 0 if found.end.ledger is None else found.end.ledger.releases
    assert (hub > 0) == (price.paid_at == "hub" and price.payments > 0)


def mechanism_of(server: Any) -> Any:
    """What adds noise, where it follows from the terms."""
    return server.terms.aggregation.mechanism(server.terms)


@pytest.mark.parametrize(
    ("name", "kind", "noise"),
    [
        ("dp-fts-de", "CorrelatedGaussianSum", lambda s: plan_of(s).mechanism(0).noise_std.max()),
        (
            "dp-fts-de, as published",
            "WeightedGaussianSum",
            lambda s: plan_of(s).mechanism(0).noise_std[0],
        ),
        ("dp-fts-de, nothing released", "none", lambda s: 0.0),
        (
            "dp-fts-de, distributed",
            "DistributedGaussianSum",
            lambda s: private_sum(s).mechanism.noise_std,
        ),
        ("dp-fts-de, distributed, nothing released", "none", lambda s: 0.0),
        (
            "fed-gp, server's noise",
            "GaussianSum",
            lambda s: private_sum(s).mechanism.noise_std[0],
        ),
        (
            "fed-gp, agents' noise, threshold",
            "DistributedGaussianSum",
            lambda s: private_sum(s).mechanism.noise_std,
        ),
        ("private-ucb, joint", "PrefixSum", lambda s: mechanism_of(s).noise_std(4)),
        ("private-ucb, local", "LocalGaussian", lambda s: mechanism_of(s).noise_scale),
        ("private-ucb, public", "BlockSum", lambda s: mechanism_of(s).noise_std),
    ],
)
def test_a_price_names_the_mechanism_and_its_noise(
    name: str, kind: str, noise: Callable[[Any], float]
) -> None:
    price, server = price_of(name), finished(name).server
    assert price.mechanism == kind
    assert price.noise_std == pytest.approx(float(noise(server)))
    assert price.settings.startswith(kind)


def test_seeded_noise_makes_no_price_private() -> None:
    study = replace(STUDIES["dp-fts-de"](), noise=InsecureSeededNoise(0))
    price = study.price(SPACE, NAMES)
    assert not price.guarantee.private
    assert not price.spent([Entry(price.event, 1, "")]).private
    assert price_of("dp-fts-de").spent([price.event]).private
    assert not price_of("dp-fts-de").spent([Entry(price.event, 1, "", private=False)]).private


def test_first_payments() -> None:
    one, two = Entry(Event(1.0), 2, ""), Entry(Event(2.0), 3, "")
    assert first_payments((one, two), 0) == ()
    assert first_payments((one, two), 1) == (replace(one, count=1),)
    assert first_payments((one, two), 4) == (one, replace(two, count=2))
    assert first_payments((one, two), 9) == (one, two)


# ------------------------------------------------------------------ values, words and files


@pytest.mark.parametrize("name", STUDIES)
def test_both_survive_json(name: str) -> None:
    sees, price = sees_of(name), STUDIES[name]().price(SPACE, NAMES)
    assert Sees.from_dict(json.loads(json.dumps(sees.to_dict()))) == sees
    if price is not None:
        assert Price.from_dict(json.loads(json.dumps(price.to_dict()))) == price


def test_a_saved_result_says_both(tmp_path: Any) -> None:
    study = STUDIES["dp-fts-de"]()
    result = run(study, dict.fromkeys(NAMES, bowl), seed=0, space=SPACE)
    assert (result.sees, result.price) == (study.sees(SPACE, NAMES), study.price(SPACE, NAMES))
    result.save(tmp_path)
    loaded = RunResult.load(tmp_path)
    assert (loaded.sees, loaded.price) == (result.sees, result.price)
    head = json.loads((tmp_path / "result.json").read_text())
    for key in ("sees", "price", "measure"):
        del head[key]
    (tmp_path / "result.json").write_text(json.dumps(head))
    old = RunResult.load(tmp_path)
    assert (old.sees, old.price, old.measure) == (None, None, "simple")


def test_a_bandit_is_judged_by_all_of_its_evaluations() -> None:
    study = STUDIES["private-ucb, none"]()
    result = run(study, dict.fromkeys(NAMES, bowl), seed=0, space=SPACE)
    assert result.measure == "cumulative"


@pytest.mark.parametrize("name", STUDIES)
def test_sentences_are_sentences(name: str) -> None:
    for sentence in sees_of(name).sentences:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert ".." not in sentence
    price = STUDIES[name]().price(SPACE, NAMES)
    assert price is None or "epsilon <=" in str(price)


def test_rows_that_are_no_rows() -> None:
    sender: Any = "hub"
    with pytest.raises(InputDataError, match=r"Expected a sender of .*got 'hub'"):
        Row("Setup", sender, "settings", ("agents",))
    readers: Any = ("neighbours",)
    with pytest.raises(InputDataError, match=r"Expected readers of .*neighbours"):
        Row("Setup", "server", "settings", readers)
    row = Row("Setup", "server", "settings", ("agents",))
    with pytest.raises(InputDataError, match="one row for each kind of message"):
        Sees((row, row), "No party is trusted.")
    with pytest.raises(InputDataError, match=r"Expected a message of \['Setup'\], got 'Query'"):
        Sees((row,), "No party is trusted.").row("Query")


def test_a_server_that_says_nothing_is_asked_about_by_its_study() -> None:
    study = FTS(budget=3)
    assert disclosed(study, object(), SPACE, NAMES) == (study.sees(SPACE, NAMES), None)
    assert disclosed(object(), object(), SPACE, NAMES) == (None, None)


@pytest.mark.parametrize("name", STUDIES)
def test_names_may_be_a_list(name: str) -> None:
    study = STUDIES[name]()
    assert study.sees(SPACE, list(NAMES)) == study.sees(SPACE, NAMES)
    assert study.price(SPACE, list(NAMES)) == study.price(SPACE, NAMES)
