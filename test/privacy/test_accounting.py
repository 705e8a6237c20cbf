"""Published figures, exact formulas, and ledgers that survive whatever happens to their files."""

from __future__ import annotations

import copy
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from botorch.exceptions.errors import InputDataError, UnsupportedError
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.published.moments import moments_epsilon
from botorch_fed.errors import BudgetExceeded, ProtocolError
from botorch_fed.privacy import accounting
from botorch_fed.privacy.accounting import (
    Budget,
    Entry,
    Event,
    Guarantee,
    Ledger,
    LedgerFile,
    compose,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    noise_multiplier_for,
)
from botorch_fed.wire.codec import decode, encode

DELTA = 200**-1.1  # of the published losses; 40 releases

# q, z: the loss as printed by Dai et al. 2021, and by the accountants
PUBLISHED: dict[tuple[float, float], tuple[float, dict[Any, float]]] = {
    (0.15, 1.0): (
        5.93,
        {"rdp": 4.850, "dp-accounting-rdp": 4.878, "prv": 3.974, "pld": 3.964},
    ),
    (0.25, 1.0): (
        9.91,
        {"rdp": 8.362, "dp-accounting-rdp": 8.406, "prv": 7.065, "pld": 7.054},
    ),
    (0.5, 1.0): (
        20.12,
        {
            "rdp": 17.906,
            "dp-accounting-rdp": 18.403,
            "prv": 15.721,
            "pld": 15.710,
        },
    ),
    (0.25, 1.2): (
        7.39,
        {"rdp": 6.110, "dp-accounting-rdp": 6.180, "prv": 5.163, "pld": 5.152},
    ),
    (0.25, 1.5): (
        5.22,
        {"rdp": 4.262, "dp-accounting-rdp": 4.266, "prv": 3.608, "pld": 3.597},
    ),
}
# The digits of the table, and for PRV and Rényi the freedom of their grids.
TOLERANCE = {"pld": 5e-3, "prv": 0.02, "rdp": 0.02, "dp-accounting-rdp": 0.02}


def _forty(q: float, z: float, **kwargs: Any) -> float:
    kwargs = {"num_releases": 40, "delta": DELTA} | kwargs
    return epsilon(sampling_rate=q, noise_multiplier=z, **kwargs).epsilon


def _moments(q: float, z: float, count: int = 40) -> float:
    return moments_epsilon(sampling_rate=q, noise_multiplier=z, num_releases=count, delta=DELTA)


# ------------------------------------------------------------------ known numbers


@pytest.mark.parametrize(("q", "z"), PUBLISHED)
def test_published_losses(q: float, z: float) -> None:
    assert round(_moments(q, z), 2) == PUBLISHED[q, z][0]


def test_published_losses_are_of_forty_releases_not_forty_one() -> None:
    values = [round(_moments(q, z, 41), 2) for q, z in PUBLISHED]
    assert values == [6.01, 10.01, 20.48, 7.50, 5.28]


@pytest.mark.parametrize("accountant", TOLERANCE)
@pytest.mark.parametrize(("q", "z"), PUBLISHED)
def test_every_accountant(q: float, z: float, accountant: Any) -> None:
    expected = PUBLISHED[q, z][1][accountant]
    assert _forty(q, z, accountant=accountant) == pytest.approx(expected, abs=TOLERANCE[accountant])


@pytest.mark.parametrize(
    ("q", "z", "expected"), [(0.15, 1, 6.41), (0.25, 1, 12.18), (0.5, 1, 31.18), (0.25, 1.5, 7.11)]
)
def test_replacing_costs_more(q: float, z: float, expected: float) -> None:
    assert _forty(q, z, adjacency="replace-one") == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("num_agents", "constant", "delivered"),
    [(29, 10.38, 6.20), (30, 10.44, 6.24), (50, 11.32, 6.87)],
)
def test_the_papers_noise_delivers_more_than_it_claims(
    num_agents: int, constant: float, delivered: float
) -> None:
    # Four regions, agents dealt round; the weights of round t are a softmax of contrast a_t - 1.
    # The papers' noise is z phi_max S / q where the sensitivity is max |phi_n| S / (2 q).
    levels = [16.0] * 11 + np.linspace(16, 1, 30)[1:].tolist()
    levels += [1.0] * (60 - len(levels))
    sizes = np.bincount(np.arange(num_agents) % 4)
    events = []
    for level in levels:
        inside = math.exp(level - 1)
        phi = np.ones((4, 4)) + (inside - 1) * np.eye(4)  # regions x agents of one kind each
        phi /= (sizes * inside + num_agents - sizes)[:, None]
        events.append(Event(phi.max() * 2 / np.linalg.norm(phi, axis=0).max(), 0.35))
    delta = num_agents**-1.1
    assert compose(events, delta=delta).epsilon == pytest.approx(delivered, abs=0.01)
    claimed = epsilon(sampling_rate=0.35, noise_multiplier=1, num_releases=60, delta=delta)
    assert claimed.epsilon == pytest.approx(constant, abs=0.006)


@pytest.mark.parametrize(
    ("eps", "delta", "std"),
    [
        (0.1, 0.1, 2.846924),
        (1.0, 0.1, 1.085878),
        (10.0, 0.1, 0.281812),
        (0.1, 1e-5, 30.749566),
        (1.0, 1e-5, 3.730632),
        (10.0, 1e-5, 0.499889),
    ],
)
def test_standard_deviation_of_one_release(eps: float, delta: float, std: float) -> None:
    mu = gaussian_mu(eps, delta)
    assert 1 / mu == pytest.approx(std, abs=6e-7)  # Balle & Wang 2018, by 40 digits
    assert gaussian_delta(eps, mu) <= delta
    assert gaussian_delta(eps, mu) == pytest.approx(delta, rel=1e-9)
    assert gaussian_epsilon(delta, mu) == pytest.approx(eps, rel=1e-9)


@given(st.floats(0.0, 50.0), st.floats(1e-12, 0.5))
def test_gaussian_inverses_round_to_the_safe_side(eps: float, delta: float) -> None:
    mu = gaussian_mu(eps, delta)
    assert gaussian_delta(eps, mu) <= delta
    found = gaussian_epsilon(delta, mu)
    assert gaussian_delta(found, mu) <= delta
    assert found <= eps * (1 + 1e-9) + 1e-9


def test_gaussian_extremes() -> None:
    assert gaussian_delta(0.0, 1e-8) == pytest.approx(1e-8 / math.sqrt(2 * math.pi), rel=1e-6)
    assert gaussian_delta(1e4, 100.0) == pytest.approx(0.0, abs=1e-12)
    assert gaussian_delta(math.inf, 1.0) == 0.0
    assert gaussian_epsilon(0.9, 0.1) == 0.0
    for wrong in [0.0, -1.0, math.inf, math.nan]:
        with pytest.raises(InputDataError, match="positive finite mu"):
            gaussian_delta(1.0, wrong)
    with pytest.raises(InputDataError, match="epsilon >= 0"):
        gaussian_delta(-1.0, 1.0)


@pytest.mark.parametrize("accountant", ["pld", "gdp"])
def test_without_sampling_it_is_exact(accountant: Any) -> None:
    result = epsilon(
        sampling_rate=1, noise_multiplier=5, num_releases=40, delta=1e-5, accountant=accountant
    )
    assert result.epsilon == pytest.approx(5.759481, abs=1e-6)
    assert result.accountant == accountant


def test_privacy_loss_distributions_agree_with_the_closed_form() -> None:
    part = accounting._Part(mu=0.2, rate=1.0, count=40)
    loss = accounting._composed((part,), 2e-4, "zero-out", True)
    assert loss.get_epsilon_for_delta(1e-5) == pytest.approx(5.759481, abs=1e-4)


def test_replacing_without_sampling_agrees_with_the_closed_form() -> None:
    exact = epsilon(
        sampling_rate=1, noise_multiplier=5, num_releases=40, delta=1e-5, adjacency="replace-one"
    )
    assert exact.epsilon == gaussian_epsilon(1e-5, 2 * math.sqrt(40) / 5)
    nearly = epsilon(
        sampling_rate=1 - 1e-12,
        noise_multiplier=5,
        num_releases=40,
        delta=1e-5,
        adjacency="replace-one",
    )
    assert nearly.epsilon == pytest.approx(exact.epsilon, abs=1e-4)


def test_central_limit_is_no_bound_and_refused() -> None:
    # It would give 3.677 for what truly costs at least 3.961.
    with pytest.raises(UnsupportedError, match="no upper bound with it: use 'pld'"):
        _forty(0.15, 1, accountant="gdp")
    lower = accounting._optimistic_epsilon(((Event(1, 0.15), 40),), DELTA, "zero-out")
    assert 3.961 <= lower <= _forty(0.15, 1)


@pytest.mark.parametrize("z", [0.02, 0.009])
def test_little_noise_is_bounded_by_no_sampling(z: float) -> None:
    sampled, everyone = _forty(0.5, z), _forty(1.0, z)
    assert 1000 < sampled <= everyone
    assert (sampled == everyone) == (z < 0.01)


# ------------------------------------------------------------------ precision and speed


@pytest.mark.parametrize(("q", "z", "count"), [(0.35, 1.0, 60), (0.1, 1.0, 10_000), (0.1, 3, 100)])
def test_a_finer_grid_changes_nothing(q: float, z: float, count: int) -> None:
    event = Event(z, q)
    fine = accounting._composed((accounting._Part(1 / z, q, count),), 3e-4 / z, "zero-out", True)
    found = compose([Entry(event, count, "")], delta=1e-4).epsilon
    assert found == pytest.approx(fine.get_epsilon_for_delta(1e-4), abs=2e-3)


def test_a_misspelt_adjacency_is_no_zero_out() -> None:
    with pytest.raises(InputDataError, match="adjacency must be one of"):
        noise_multiplier_for(
            epsilon=1,
            delta=1e-5,
            sampling_rate=1,
            num_releases=1,
            adjacency="replace_one",  # type: ignore[arg-type]
        )


def test_ten_thousand_rounds_in_two_seconds() -> None:
    accounting._beginnings.clear()
    accounting._epsilon.cache_clear()
    start = time.process_time()
    epsilon(sampling_rate=0.1, noise_multiplier=1, num_releases=10_000, delta=1e-5)
    assert time.process_time() - start < 2


def test_different_releases_cost_as_much_in_any_order() -> None:
    events = [Event(1 + 0.05 * k, 0.35) for k in range(6)]
    forward = compose(events, delta=0.02).epsilon
    assert compose(events[::-1], delta=0.02).epsilon == pytest.approx(forward, abs=1e-9)


def test_nearly_equal_releases_cost_as_much_as_equal_ones() -> None:
    events = [Event(1 + 1e-12 * k, 0.35) for k in range(11)]
    equal = compose([Entry(Event(1, 0.35), 11, "")], delta=0.02).epsilon
    assert compose(events, delta=0.02).epsilon == pytest.approx(equal, abs=1e-6)


class _Counted:
    made = 0

    def compose(self, other: object) -> _Counted:
        _Counted.made += 1
        return self


def test_many_different_releases_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_one_kind", lambda *arguments: _Counted())
    monkeypatch.setattr(accounting, "_beginnings", {})
    parts = tuple(accounting._Part(1 + k / 1000, 0.1, 1) for k in range(1001))
    accounting._composed(parts[:1000], 1e-3, "zero-out", True)
    assert _Counted.made == 999
    accounting._composed(parts, 1e-3, "zero-out", True)
    accounting._composed((*parts[:-1], accounting._Part(5.0, 0.1, 2)), 1e-3, "zero-out", True)
    assert _Counted.made == 1001
    assert len(accounting._beginnings) <= accounting._MAX_BEGINNINGS


def test_with_and_without_sampling_mix() -> None:
    mixed = compose([Event(5.0), Entry(Event(1.0, 0.15), 40, "")], delta=DELTA).epsilon
    assert _forty(0.15, 1) < mixed < _forty(0.15, 1) + gaussian_epsilon(1e-5, 0.2)
    barely = compose([Event(1e6), Entry(Event(1.0, 0.15), 40, "")], delta=DELTA).epsilon
    assert barely == pytest.approx(_forty(0.15, 1), abs=1e-4)


def test_too_small_a_delta_is_refused_not_rounded() -> None:
    with pytest.raises(UnsupportedError, match="too small for 'pld' with 40 sampled releases"):
        _forty(0.15, 1, delta=1e-13)
    assert _forty(1, 1, delta=1e-13) == gaussian_epsilon(1e-13, math.sqrt(40))
    assert _forty(0.15, 1, delta=1e-10) > _forty(0.15, 1, delta=1e-9)


def test_the_libraries_are_quiet(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    _forty(0.15, 1.01, accountant="dp-accounting-rdp")
    _forty(0.15, 50, accountant="rdp")
    assert not caplog.records
    assert not capfd.readouterr().err
    logging.getLogger("absl").warning("another matter")
    assert [record.message for record in caplog.records] == ["another matter"]


# ------------------------------------------------------------------ samples of a fixed size


def _fixed(z: float, size: int, population: int = 29, **kwargs: Any) -> Guarantee:
    event = Event(z, sample_size=size, population=population)
    kwargs = {"delta": DELTA, "adjacency": "replace-one"} | kwargs
    return compose([Entry(event, 40, "")], **kwargs)


def test_fixed_size_uses_the_only_accountant_that_knows_it() -> None:
    result = _fixed(2, 10)
    assert (result.accountant, result.adjacency) == ("dp-accounting-rdp", "replace-one")
    assert _fixed(2, 10) == _fixed(2, 10, accountant="dp-accounting-rdp")
    assert _fixed(2, 5).epsilon < result.epsilon < _fixed(2, 20).epsilon


def test_fixed_size_of_all_is_no_sampling() -> None:
    # Replacing moves two norms, so that the noise counts half.
    everyone = {"sampling_rate": 1, "num_releases": 40, "delta": DELTA}
    renyi = epsilon(noise_multiplier=2, accountant="dp-accounting-rdp", **everyone)  # type: ignore[arg-type]
    assert _fixed(4, 29).epsilon == pytest.approx(renyi.epsilon, rel=1e-12)
    exact = gaussian_epsilon(DELTA, 2 * math.sqrt(40) / 4)
    assert exact < _fixed(4, 29).epsilon < 1.3 * exact


def test_fixed_size_is_never_fed_to_another_accountant() -> None:
    with pytest.raises(UnsupportedError, match="under adjacency='replace-one' only"):
        _fixed(2, 10, adjacency="zero-out")
    for accountant in ["pld", "prv", "rdp", "gdp"]:
        with pytest.raises(UnsupportedError, match="use 'dp-accounting-rdp'"):
            _fixed(2, 10, accountant=accountant)
    with pytest.raises(UnsupportedError, match="No accountant composes"):
        compose(
            [Event(1, 0.5), Event(1, sample_size=2, population=9)],
            delta=DELTA,
            adjacency="replace-one",
        )


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "must be positive"),
        ((-1.0,), "must be positive"),
        ((math.inf,), "must be finite"),
        ((math.nan,), "must be finite"),
        (("1",), "must be a number, got str"),
        ((True,), "must be a number, got bool"),
        ((1.0, 0.0), r"\(0, 1\], got 0"),
        ((1.0, 1.5), r"\(0, 1\], got 1.5"),
        ((1.0, 1.0, 3), "both sample_size and population"),
        ((1.0, 1.0, 3, 2), "sample_size <= population"),
        ((1.0, 0.5, 3, 9), "a sampling_rate of 1"),
        ((1.0, 1.0, 0, 9), "from 1 on, got 0"),
        ((1.0, 1.0, 2.0, 9), "from 1 on, got 2.0"),
    ],
)
def test_impossible_events(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        Event(*arguments)


def test_impossible_questions() -> None:
    for delta in [0, 1, -1e-5, math.nan]:
        with pytest.raises(InputDataError, match=r"delta must lie in \(0, 1\)"):
            compose([Event(1)], delta=delta)
        with pytest.raises(InputDataError, match=r"delta"):
            noise_multiplier_for(epsilon=1, delta=delta, sampling_rate=0.5, num_releases=3)
    for eps in [0, -1, math.inf, math.nan]:
        with pytest.raises(InputDataError, match="positive and finite"):
            noise_multiplier_for(epsilon=eps, delta=0.1, sampling_rate=0.5, num_releases=3)
        with pytest.raises(InputDataError, match="finite"):
            Budget(eps, 0.1)
    with pytest.raises(InputDataError, match="from 1 on, got 0"):
        noise_multiplier_for(epsilon=1, delta=0.1, sampling_rate=0.5, num_releases=0)
    with pytest.raises(InputDataError, match="from 0 on, got -1"):
        _forty(0.5, 1, num_releases=-1)
    with pytest.raises(InputDataError, match="accountant must be one of"):
        _forty(0.5, 1, accountant="clt")
    with pytest.raises(InputDataError, match="adjacency must be one of"):
        _forty(0.5, 1, adjacency="add-remove")
    with pytest.raises(InputDataError, match="unit must be one of"):
        _forty(0.5, 1, unit="user")


def test_a_guarantee_says_what_it_is() -> None:
    result = epsilon(
        sampling_rate=0.35,
        noise_multiplier=1,
        num_releases=60,
        delta=29**-1.1,
        adjacency="replace-one",
        unit="record",
    )
    for text in [str(result), repr(result)]:
        for part in ["record", "replace-one", "60", "pld", "0.0246"]:
            assert part in text
        assert "not private" not in text
    seeded = Guarantee(1.0, 0.1, "agent", "zero-out", 3, "pld", private=False)
    assert "not private: seeded noise" in str(seeded)
    assert "not private: seeded noise" in repr(seeded)
    for eps in [-1.0, math.inf, math.nan]:
        with pytest.raises(InputDataError, match="epsilon"):
            Guarantee(eps, 0.1, "agent", "zero-out", 3, "pld")


# ------------------------------------------------------------------ ledgers


def test_a_ledger_adds_up() -> None:
    ledger = Ledger(unit="record")
    for note in ["", "", "pilot"]:
        ledger = ledger.spend(Event(1, 0.35), count=10, note=note)
    assert ledger.releases == 30
    assert [(entry.count, entry.note) for entry in ledger.entries] == [(20, ""), (10, "pilot")]
    expected = epsilon(
        sampling_rate=0.35, noise_multiplier=1, num_releases=30, delta=0.02, unit="record"
    )
    assert ledger.guarantee(delta=0.02) == expected
    assert ledger.guarantee(delta=0.02, accountant="rdp").epsilon > expected.epsilon
    with pytest.raises(InputDataError, match="pass delta="):
        ledger.guarantee()
    assert "'zero-out', unit='agent'" in repr(Ledger())


def test_a_budget_lasts_exactly_as_long_as_planned() -> None:
    budget = Budget(2.0, 29**-1.1)
    z = noise_multiplier_for(epsilon=2, delta=budget.delta, sampling_rate=0.35, num_releases=60)
    ledger = Ledger(budget=budget).spend(Event(z, 0.35), count=57)
    for _ in range(3):
        ledger = ledger.spend(Event(z, 0.35))
    assert 1.998 < ledger.guarantee().epsilon <= 2
    with pytest.raises(
        BudgetExceeded, match=r"60 releases have spent 1.99.* is left .*agent, zero"
    ):
        ledger.spend(Event(z, 0.35))
    with pytest.raises(BudgetExceeded, match="Nothing was computed"):
        Ledger(budget=budget).spend(Event(z, 0.35), count=61)
    with pytest.raises(BudgetExceeded):  # a little of something else is too much as well
        ledger.spend(Event(30.0, 0.35))
    assert "60 releases, 2 spent" in str(ledger)


def test_a_ledger_refuses_what_cannot_be_composed() -> None:
    fixed = Event(1, sample_size=3, population=9)
    with pytest.raises(UnsupportedError, match="replace-one"):
        Ledger().spend(fixed)
    replaced = Ledger(adjacency="replace-one").spend(fixed)
    assert replaced.guarantee(delta=0.1).accountant == "dp-accounting-rdp"
    with pytest.raises(UnsupportedError, match="No accountant composes"):
        replaced.spend(Event(1, 0.5))
    for wrong in [1.0, "event", None]:
        with pytest.raises(InputDataError, match="Only an Event"):
            Ledger().spend(wrong)  # type: ignore[arg-type]
    for count in [0, -1, 1.0, True]:
        with pytest.raises(InputDataError, match="from 1 on"):
            Ledger().spend(Event(1), count=count)  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="A note must be a str"):
        Ledger().spend(Event(1), note=1)  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="adjacency"):
        Ledger(adjacency="replace")  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="Expected a Budget"):
        Ledger(budget=2.0)  # type: ignore[arg-type]


def test_ledgers_and_guarantees_travel() -> None:
    ledger = Ledger("replace-one", "record", Budget(50, 1e-5))
    ledger = ledger.spend(Event(3, 0.1), count=7, note="round 1").spend(Event(9))
    assert decode(encode(ledger), Ledger) == ledger
    assert decode(encode(Ledger()), Ledger) == Ledger()
    fixed = Ledger("replace-one").spend(Event(3, sample_size=3, population=9))
    assert decode(encode(fixed), Ledger) == fixed
    guarantee = ledger.guarantee()
    assert decode(encode(guarantee), Guarantee) == guarantee


# ------------------------------------------------------------------ ledgers on disk

EVENT = Event(1.0, 0.35)


def _written(path: Path, **kwargs: Any) -> bytes:
    with LedgerFile(path, **kwargs) as ledger:
        ledger.spend(EVENT, note="pilot").spend(Event(2.5), count=3, note="é\n")
    return path.read_bytes()


def test_pilot_runs_add_up(tmp_path: Path) -> None:
    budget = Budget(20.0, 29**-1.1)
    for run in range(3):
        with LedgerFile(tmp_path / "ledger", budget=budget) as ledger:
            assert ledger.releases == 20 * run
            for _ in range(2):
                assert ledger.spend(EVENT, count=10, note="pilot") is ledger
            assert (ledger.adjacency, ledger.unit) == ("zero-out", "agent")
            assert ledger.budget == budget
            assert "60 releases, 10.38 spent" in repr(ledger) or run < 2
    expected = Ledger(budget=budget).spend(EVENT, count=60, note="pilot")
    with LedgerFile(tmp_path / "ledger", budget=budget) as ledger:
        assert ledger.ledger == expected
        assert ledger.guarantee() == expected.guarantee()
        assert ledger.guarantee(accountant="rdp").epsilon > ledger.guarantee().epsilon


def test_a_file_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    _written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ProtocolError, match=r"mode 640.*chmod 600"):
        LedgerFile(path)
    with pytest.raises(IsADirectoryError):
        LedgerFile(tmp_path)


def test_every_line_tells_one_payment(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in _written(tmp_path / "ledger").splitlines()]
    assert lines[0]["adjacency"] == "zero-out"
    assert [line["note"] for line in lines[1:]] == ["pilot", "é\n"]
    assert lines[1]["event"]["sampling_rate"] == 0.35


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open hundreds of files: a disk takes milliseconds."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def test_a_payment_is_on_the_disk_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    synced: list[tuple[bool, int]] = []
    real = os.fsync

    def fsync(file: int) -> None:
        status = os.fstat(file)
        synced.append((stat.S_ISDIR(status.st_mode), status.st_size))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with LedgerFile(path) as ledger:
        assert synced[-2:] == [(False, path.stat().st_size), synced[-1]]
        assert synced[-1][0]  # the folder, in which the file has its name
        for _ in range(2):
            ledger.spend(EVENT)
            assert synced[-1] == (False, path.stat().st_size)


@pytest.mark.usefixtures("no_sync")
def test_a_crash_at_any_byte_of_the_last_payment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger"
    data = _written(path)
    start = data[:-1].rindex(b"\n") + 1
    for stop in range(start, len(data)):
        path.write_bytes(data[:stop])
        caplog.clear()
        with LedgerFile(path) as ledger:
            assert [entry.note for entry in ledger.ledger.entries] == ["pilot"]
            assert bool(caplog.records) == (stop > start)
            if stop % 50 == 0:  # the file goes on as if nothing had been
                ledger.spend(Event(2.5), count=3, note="é\n")
                assert path.read_bytes() == data
    path.write_bytes(data)
    with LedgerFile(path) as ledger:
        assert ledger.releases == 4


@pytest.mark.usefixtures("no_sync")
def test_a_crash_at_any_byte_of_the_creation(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    LedgerFile(path, budget=Budget(1, 1e-5)).close()
    data = path.read_bytes()
    for stop in range(len(data)):
        path.write_bytes(data[:stop])
        with LedgerFile(path, budget=Budget(1, 1e-5)) as ledger:
            assert ledger.releases == 0
        assert path.read_bytes() == data


def test_sectors_that_were_never_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with LedgerFile(path) as ledger:
        while ledger._end < 600:
            ledger.spend(EVENT)
        kept, releases = ledger._end, ledger.releases
        ledger.spend(EVENT, note="x" * 1000)
    data = path.read_bytes()
    for border in [kept, 1024, 1536]:
        path.write_bytes(data[:border] + bytes(len(data) - border))
        with LedgerFile(path) as ledger:
            assert ledger.releases == releases
    path.write_bytes(data[:1100] + bytes(len(data) - 1100))  # no disk does that
    with pytest.raises(ProtocolError, match="is damaged"):
        LedgerFile(path)


@pytest.mark.usefixtures("no_sync")
def test_a_changed_byte_is_seen_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    data = _written(path)
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ProtocolError, match=r"damaged|other settings"):
            LedgerFile(path)
    assert len(path.read_bytes()) == len(data)  # left as it was


def test_a_changed_or_removed_line_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first, second, third = _written(path).splitlines(keepends=True)
    cheaper = second.replace(b'"sampling_rate":0.35', b'"sampling_rate":0.01')
    for lines in [
        [first, cheaper, third],
        [first, third],
        [first, third, second],
        [first, second, second],
        [first, b"\n", second],
        [first, second.replace(b":", b": "), third],
        [first, b'{"count":1}\n', third],
        [b"a diary\n", b"without end\n"],
        [b"a diary"],
    ]:
        path.write_bytes(b"".join(lines))
        with pytest.raises(ProtocolError, match="damaged"):
            LedgerFile(path)
        assert path.read_bytes() == b"".join(lines)


def test_settings_are_fixed_at_the_creation(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    _written(path, budget=Budget(9, 1e-3))
    others: list[dict[str, Any]] = [
        {},
        {"budget": Budget(10, 1e-3)},
        {"budget": Budget(9, 1e-3), "unit": "record"},
        {"budget": Budget(9, 1e-3), "adjacency": "replace-one"},
    ]
    for other in others:
        with pytest.raises(ProtocolError, match="has other settings"):
            LedgerFile(path, **other)
    with LedgerFile(path, budget=Budget(9, 1e-3)) as ledger:
        assert ledger.releases == 4


def _try_to_open(path: Path, answers: Any) -> None:
    try:
        LedgerFile(path)
    except ProtocolError as error:
        answers.put(str(error))


def test_there_is_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with LedgerFile(path) as ledger:
        with pytest.raises(ProtocolError, match="open already"):
            LedgerFile(path)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_try_to_open, args=(path, answers))
        child.start()
        assert "open already" in answers.get(timeout=30)
        child.join()
        ledger.spend(EVENT)
    with pytest.raises(ProtocolError, match="is closed: open it again"):
        ledger.spend(EVENT)
    ledger.close()
    with LedgerFile(path) as again:
        assert again.releases == 1


@pytest.mark.usefixtures("no_sync")
def test_threads_pay_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with LedgerFile(path) as ledger:
        pay = partial(ledger.spend, EVENT)
        threads = [Thread(target=lambda: [pay() for _ in range(25)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.releases == 100
    with LedgerFile(path) as ledger:
        assert ledger.releases == 100


def test_a_file_in_other_hands_takes_no_payment(tmp_path: Path) -> None:
    path, aside = tmp_path / "ledger", tmp_path / "aside"
    with LedgerFile(path) as ledger:
        ledger.spend(EVENT)
        path.rename(aside)
        with pytest.raises(ProtocolError, match="moved, replaced or changed"):
            ledger.spend(EVENT)
        shutil.copy(aside, path)  # the same bytes, but the lock is on the other file
        with pytest.raises(ProtocolError, match="moved, replaced or changed"):
            ledger.spend(EVENT)
        aside.rename(path)
        twin = copy.copy(ledger)
        assert ledger.spend(EVENT).releases == 2
        with pytest.raises(ProtocolError, match="moved, replaced or changed"):
            twin.spend(EVENT)
        os.truncate(path, 10)
        with pytest.raises(ProtocolError, match="moved, replaced or changed"):
            ledger.spend(EVENT)


def test_a_ledger_of_zeros_is_no_new_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(bytes(len(_written(path))))
    with pytest.raises(ProtocolError, match="damaged in line 1"):
        LedgerFile(path)


def test_a_forked_process_cannot_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LedgerFile(tmp_path / "ledger") as ledger:
        monkeypatch.setattr(ledger, "_process", -1)
        with pytest.raises(ProtocolError, match="before a fork"):
            ledger.spend(EVENT)
        monkeypatch.undo()


def test_a_budget_refuses_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with LedgerFile(path, budget=Budget(2, 0.02)) as ledger:
        ledger.spend(Event(3.0, 0.35))
        before = path.read_bytes()
        with pytest.raises(BudgetExceeded, match="1 releases have spent"):
            ledger.spend(Event(0.5, 0.35))
        with pytest.raises(UnsupportedError):
            ledger.spend(Event(3.0, sample_size=1, population=2))
        assert path.read_bytes() == before
        assert ledger.spend(Event(3.0, 0.35)).releases == 2


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    real = os.write

    def half(file: int, data: Any) -> int:
        real(file, bytes(data)[: len(data) // 2])
        raise OSError("no space")

    with LedgerFile(path) as ledger:
        ledger.spend(EVENT)
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="no space"):
            ledger.spend(EVENT)
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert ledger.spend(EVENT).releases == 2
        monkeypatch.setattr(ledger, "_append", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.spend(EVENT)
        monkeypatch.undo()
        with pytest.raises(ProtocolError, match="not confirmed"):
            ledger.spend(EVENT)
    with LedgerFile(path) as ledger:
        assert ledger.releases == 2


def _interrupted(line: bytes) -> None:
    raise KeyboardInterrupt


_KILLED = """
import os, signal, sys
from botorch_fed.privacy.accounting import Budget, Event, LedgerFile
ledger = LedgerFile(sys.argv[1], budget=Budget(9.0, 1e-5))
for k in range(5):
    ledger.spend(Event(5.0), note=str(k))
    print(k, flush=True)
assert not {"opacus", "dp_accounting"} & set(sys.modules)  # slow to import, and not needed here
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(path)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["0", "1", "2", "3", "4"]
    with LedgerFile(path, budget=Budget(9.0, 1e-5)) as ledger:
        assert ledger.releases == 5


def test_seeded_noise_is_remembered(tmp_path: Path) -> None:
    event = Event(1.0)
    ledger = Ledger().spend(event).spend(event, private=False)
    assert [entry.private for entry in ledger.entries] == [True, False]
    assert not decode(encode(ledger), Ledger).guarantee(delta=1e-3).private
    assert Ledger().spend(event).guarantee(delta=1e-3).private
    with LedgerFile(tmp_path / "ledger") as book:
        book.spend(event).spend(event, private=False)
    with LedgerFile(tmp_path / "ledger") as book:
        assert book.ledger == ledger
        assert not book.guarantee(delta=1e-3).private
