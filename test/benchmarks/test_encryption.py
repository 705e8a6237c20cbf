"""What the encryption benchmark measures: sums that are right, flooding in both parts of slots."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import encryption
from botorch_fed.privacy.hazmat import ckks
from test.privacy.hazmat.encoding import encoded, real_flooding


def test_costs_of_a_small_sum() -> None:
    costs = encryption.our_costs(2, 8, repeats=1)
    assert all(value > 0 for value in costs.values())
    assert costs["error"] < 1e-12
    # Twice the numbers in use and one polynomial, of 3 primes of 4 bytes; headers beside.
    assert costs["round_kb"] == pytest.approx(3 * 4 * (8.192 + 2 * 0.064), rel=0.01)
    assert costs["setup_kb"] == pytest.approx(4 * 4 * 8.192, rel=0.01)
    assert costs["setup_received_kb"] == pytest.approx(4 * 4 * 8.192, rel=0.01)


def test_costs_of_a_set_up_of_many() -> None:
    costs = encryption.setup_of_many(30, 8)
    assert 0 < costs["cpu_s"] < 10
    # A key share there and one back, an announcement of each and a sealed key for each.
    assert costs["mb"] == pytest.approx(2 * 5 * 4 * 8.192e-3 + 30 * (249 + 2 * 48) / 1e6, rel=0.02)


@pytest.mark.parametrize("usual", [False, True])
def test_costs_of_a_sum_under_one_key(usual: bool) -> None:
    costs = encryption.tenseal_costs(8, repeats=1, usual=usual)
    assert costs["error"] < 1e-9
    assert costs["agent"] > 0


def test_slots_are_those_of_the_encoder() -> None:
    ring = ckks.Ring(8192, 2, 2)
    rng = np.random.default_rng(0)
    wide, narrow = 2.0**30 * rng.standard_normal((2, ring.degree // 2)) * [[1.0], [0.25]]
    _, noise = ckks.decode(ring, encoded(ring, wide, narrow))
    found = encryption.slot_deviations(noise * float(ring.delta))
    assert found == pytest.approx((wide.std(), narrow.std()), rel=0.01)


def test_flooding_of_real_slots_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert encryption.flooding_bits() >= 40
    monkeypatch.setattr(ckks, "flooding_words", real_flooding)
    assert encryption.flooding_bits() < 20


def test_least_of_two_turns() -> None:
    first = {"10_S8": {"agent": 2.0, "error": 1e-16}, "flooding_bits": 40.3}
    second = {"10_S8": {"agent": 1.0, "error": 1e-17}, "flooding_bits": 40.2}
    assert encryption.least(first, second) == {
        "10_S8": {"agent": 1.0, "error": 1e-16},
        "flooding_bits": 40.3,
    }


def test_documented_figures() -> None:
    assert encryption.__doc__ is not None
    keys = (
        *("agent_cpu_ms_", "server_cpu_ms_", "ratio_vs_tenseal_single_key", "ratio_vs_openfhe"),
        *("kbytes_per_agent_S32", "max_rel_error_50_agents", "flooding_bits"),
        "fed_gp_cpu_s_10_S8_50",
    )
    assert all(key in encryption.__doc__ for key in keys)
    assert all(part in encryption.__doc__ for part in encryption.PARTS)
    compile(encryption.OPENFHE, "openfhe", "exec")  # another interpreter's program
