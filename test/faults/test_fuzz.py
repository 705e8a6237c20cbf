"""Mutated messages: nothing is accepted that should not be, nothing crashes, hangs or swells."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from botorch_fed.aggregation.relay import Relay
from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.aggregation.stream import JointStream, LocalStream, PublicStream, Stream
from botorch_fed.federation import drive as drive_module
from botorch_fed.federation.agent import FederatedAgent
from botorch_fed.federation.base import Request
from botorch_fed.federation.server import FederatedServer
from botorch_fed.federation.site import Site
from botorch_fed.privacy.channels import Channel
from botorch_fed.wire import codec
from test.faults import fuzz as module
from test.faults.fuzz import MAX_BYTES, Findings, Traffic, fuzz, recorded

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

MESSAGES = 3000  # a million by `python -m benchmarks.faults`


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return recorded()


def test_mutants_of_all_messages(traffic: Traffic) -> None:
    orders = [one for one in traffic.visits if one.case.startswith("fed-gp")]
    others = [one for one in traffic.visits if one not in orders]
    found = fuzz(replace(traffic, visits=others), MESSAGES)
    assert found.messages == MESSAGES
    assert found.reframed >= MESSAGES / 2
    assert found.ciphers >= MESSAGES / 100
    assert found.accepted > 0  # another message of the same kind is none to refuse
    assert not found.bad, found.examples
    assert not found.crashes, found.examples
    assert found.hung == 0
    assert found.peak_mb < 150 * MAX_BYTES / 2**20  # see `wire.codec.MAX_BYTES`


def test_mutants_of_orders(traffic: Traffic) -> None:
    orders = [one for one in traffic.visits if one.case.startswith("fed-gp")]
    found = fuzz(replace(traffic, visits=orders, returns=[]), MESSAGES)
    assert not found.bad, found.examples
    assert not found.crashes, found.examples


def test_every_kind_of_message_is_recorded(traffic: Traffic) -> None:
    names = {module.read(body)[1] for _, body in traffic.bodies}
    blobs = {module.read(blob)[1] for one in traffic.visits for blob in one.blobs.values()}
    assert names == {
        "Order",
        "Play",
        "Upload",
        "Contribution",
        "SumOrder",
        "KeyMessage",
        "DecryptionShare",
    }
    assert blobs >= {"Setup", "Rows", "Noisy", "Parameters", "Keys", "Sealed", "Opened"}


def test_valid_messages_are_accepted(traffic: Traffic) -> None:
    """Restored, every receiver takes what it took: otherwise mutants would meet closed doors."""
    for one in (*traffic.visits[::7], *traffic.returns[::7]):
        one.restore()
        good = module.Mutant(one.good, {}, "none", False, False)
        accepted, _ = module.deliver(one, good)
        one.restore()
        assert accepted, one.case
        assert module.judge(one, good) is None, one.case


# ------------------------------------------------------------------ the oracles can fail


def nothing(*_: Any, **__: Any) -> None:
    return None


DEFECTS: dict[str, tuple[str, Any, str, Callable[..., Any], str]] = {
    "fts server": ("fts", FederatedServer, "check", nothing, "mis-sized"),
    "dp server": ("dp-fts-de", FederatedServer, "check", nothing, "mis-sized"),
    "joint server": ("ucb-joint", JointStream, "check_values", nothing, "out of range"),
    "local server": ("ucb-local", LocalStream, "check_values", nothing, "mis-sized"),
    "agent": ("ucb-public", PublicStream, "check_order", nothing, "stale round"),
    "action": ("ucb-public", PublicStream, "check_order", Stream.check_order, "out of range"),
    "contributions": ("fed-gp-plain", SecureSum, "check", nothing, "payload"),
    "headers": (
        "fed-gp-threshold",
        Channel,
        "_body",
        lambda self, payload, *_: memoryview(payload)[module.HEADER.size :],
        "payload of another",
    ),
    "broadcast": ("fts", Relay, "check_published", nothing, ""),
    "release": ("ucb-joint", Stream, "check_published", nothing, "broadcast"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_missing_check_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, owner, what, stand_in, reason = DEFECTS[defect]
    traffic = recorded((case,))

    def noticed(found: Findings) -> bool:
        """What nobody has checked is accepted, or makes the receiver fall over."""
        return any(reason in why for why in found.bad) or bool(found.crashes)

    assert not noticed(fuzz(traffic, 300))  # as it is shipped; of all cases, more are tried above
    monkeypatch.setattr(owner, what, stand_in)
    assert noticed(searched(traffic, noticed))


def test_numbers_that_are_none_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec, the check and the mechanism each refuse them; without two of them a run stops."""
    traffic = recorded(("dp-fts-de",))
    monkeypatch.setattr(codec._Array, "_check_values", staticmethod(nothing))
    assert not fuzz(traffic, 2000).bad
    monkeypatch.setattr(FederatedServer, "check", nothing)
    found = searched(traffic, lambda found: any("finite" in why for why in found.crashes))
    assert any("not finite" in why for why in found.crashes)


def searched(traffic: Traffic, noticed: Callable[[Findings], bool]) -> Findings:
    """Mutants until a defect is noticed, in the end in vain."""
    total = Findings()
    for seed in range(12):
        total = fuzz(traffic, 1000, seed=seed)
        if noticed(total):
            break
    return total


def test_a_frame_that_nobody_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = recorded(("fts",))
    one = traffic.returns[4]
    traffic.visits, traffic.returns = [], [one]
    monkeypatch.setattr(drive_module, "_is_about", lambda *_: True)
    found = fuzz(traffic, 500)
    assert any("mis-addressed" in why for why in found.bad)


def test_a_site_that_takes_old_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = recorded(("fts",))
    traffic.returns = []
    real = Site._frame

    def newest(self: Site, request: bytes) -> Request:
        frame = real(self, request)
        serial = self.serial + 1
        return replace(frame, serial=serial, asked=serial - 1, replied=0)

    monkeypatch.setattr(Site, "_frame", newest)
    assert any("stale" in why for why in fuzz(traffic, 3000).bad)


def test_a_server_that_stops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = recorded(("fts",))
    monkeypatch.setattr(FederatedServer, "check", nothing)
    assert searched(traffic, lambda found: bool(found.crashes)).crashes


def test_a_site_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = recorded(("fts",))
    traffic.returns = []
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    monkeypatch.setattr(FederatedAgent, "check", lambda *_: time.sleep(30))
    assert fuzz(traffic, 40).hung > 0
