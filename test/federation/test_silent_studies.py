"""A study in which nothing would ever be sent is refused, with what to write instead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import Constant
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP
from test.cases import uniform

SPACE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
NAMES = ("ann", "bob")
DEAF = TransferSearch(listen=False)
NEVER = "No message would ever be sent"


def data(n: int) -> dict[str, Any]:
    return {name: (uniform(n, 2, seed=i), uniform(n, 1)) for i, name in enumerate(NAMES)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FTS(budget=9, every=0), f"{NEVER}: every = 0 .*Write every = 1, or give data"),
        (lambda: FTS(budget=9, every=0, data=data(2)), NEVER),  # three make a first message
        (lambda: FTS(budget=9, every=10), f"{NEVER}: every = 10 is more than the 9 rounds"),
        (lambda: FTS(budget=8, every=5, q=2), "more than the 4 rounds"),
        (lambda: FTS(budget=9, strategy=Strategy()), NEVER),
        (lambda: FTS(budget=9, strategy=Strategy(transfer="rgpe", prior_until=0)), NEVER),
        (
            lambda: DPFTSDE(budget=3, epsilon=1.0),
            r"budget = 3 leaves no round after 3 initial points.*budget = 4 or more.*releases=\(\)",
        ),
        (lambda: DPFTSDE(budget=10, epsilon=1.0, strategy=Following()), "write budget = 11"),
        (
            lambda: DPFTSDE(budget=5, epsilon=1.0, releases=(4,)),
            r"releases = \(4,\) come after the last of 2 rounds. Write releases = \(0,\), or "
            "budget = 8 or more",
        ),
        (lambda: FedGP(budget=3), r"no round after 3 initial points.*models=.local"),
        (lambda: FedGP(budget=9, sums=0), "sums = 0 opens no sum: leave it out"),
        (
            lambda: FedGP(budget=4, search=SupportSearch(), data=data(0)).server(SPACE, NAMES),
            "no round after 4 initial points",
        ),
    ],
)
def test_settings_that_leave_nothing_to_send_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InputDataError, match=said):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: FTS(budget=9, every=0, data=data(3)),
        lambda: FTS(budget=9, every=0, strategy=DEAF),
        lambda: FTS(budget=9, every=9),
        lambda: FTS(budget=9, strategy=Strategy(), data=data(1)),
        lambda: FTS(budget=9, strategy=Strategy(schedule=Constant(1.0), prior_until=0)),
        lambda: DPFTSDE(budget=3, releases=()),
        lambda: DPFTSDE(budget=4, epsilon=1.0),
        lambda: DPFTSDE(budget=1, epsilon=1.0, data=data(3)),
        lambda: FedGP(budget=4, search=SupportSearch(models="local")),
        lambda: FedGP(budget=1, data=data(3), channel="plain"),
    ],
)
@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_sites_may_search_alone_on_purpose(make: Any) -> None:
    made = make()
    made.server(SPACE, NAMES)


def test_a_site_without_others_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    for made in (FTS(budget=4), FedGP(budget=4, channel="plain")):
        with caplog.at_level(logging.WARNING):
            made.server(SPACE, NAMES[:1])
        assert "the study has one site, 'ann': nobody reads its messages" in caplog.text
        caplog.clear()
    FTS(budget=4, strategy=DEAF).server(SPACE, NAMES[:1])
    FTS(budget=4).server(SPACE, NAMES)
    assert not caplog.text


def test_a_budget_below_a_first_message_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    FTS(budget=2).server(SPACE, NAMES)
    assert "a first message needs 3 observations, the budget is 2" in caplog.text
