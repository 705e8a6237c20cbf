"""Standard errors that a site is told, through the log to the models of every default search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.federation.base import Exchanged, Outgoing
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.run import make_agent
from botorch_fed.search.messages import TransferRows
from botorch_fed.search.noisy import NoisyTransfer
from botorch_fed.search.sums import TransferSum
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS, FedGP

REALS = (Parameter.real("x", 0.0, 1.0), Parameter.real("z", 0.0, 1.0))
SPACE = SearchSpace(REALS, Outcome(centre=5.0, scale=2.0, minimize=True))
NAMES = ("ann", "bob")


def a_site(study: Any = None, space: SearchSpace = SPACE, log: Any = None) -> Site:
    agent = make_agent(FTS(budget=8) if study is None else study, "ann", space, 0, MemoryBlobs())
    return Site("ann", agent, None, log=Log(SITE_EVENTS) if log is None else log)


def at(x: float) -> dict[str, float]:
    return {"x": x, "z": 0.5}


def test_variances_are_on_the_public_scale_and_survive_the_log(tmp_path: Path) -> None:
    log = FileLog(tmp_path, SITE_EVENTS)
    site = a_site(log=log)
    site.attach(at(0.1), 6.0, 0.4)
    site.attach(at(0.2), 7.0)
    site.attach(at(0.3), 8.0, 0.0)
    expected = torch.tensor([[0.04], [-1.0], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(site.state.Yvar, expected)
    log.close()
    again = a_site(log=FileLog(tmp_path, SITE_EVENTS))
    torch.testing.assert_close(again.state.Yvar, expected)


def test_every_outcome_has_its_own() -> None:
    outcomes = (Outcome.objective("error"), Outcome.constraint("size", upper=1.0))
    site = a_site(space=SearchSpace(REALS, outcomes=outcomes))
    site.attach(at(0.1), {"error": 1.0, "size": 2.0}, {"error": 0.1, "size": 0.5})
    expected = torch.tensor([[0.01, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(site.state.Yvar, expected)


@dataclass(frozen=True, kw_only=True)
class Watching(TransferSearch):
    """Notes with which variances it was asked."""

    seen: Any = None

    @property
    def settings(self) -> str:
        return TransferSearch().settings

    def point(self, *args: Any, Yvar: Tensor | None = None, **options: Any) -> Tensor:
        self.seen.append(("point", Yvar))
        return super().point(*args, Yvar=Yvar, **options)

    def report(self, *args: Any, Yvar: Tensor | None = None) -> Tensor | None:
        self.seen.append(("message", Yvar))
        return super().report(*args, Yvar=Yvar)

    def message(self, *args: Any, Yvar: Tensor | None = None) -> Tensor | None:
        self.seen.append(("message", Yvar))
        return super().message(*args, Yvar=Yvar)


STUDIES = {
    "rows": lambda strategy: FTS(budget=6, search=TransferRows(strategy=strategy), every=1),
    "sum": lambda strategy: FedGP(budget=6, search=TransferSum(strategy=strategy), channel="plain"),
    "noisy sum": lambda strategy: DPFTSDE(
        budget=6,
        search=NoisyTransfer(strategy=strategy, min_reliability=0.0),
        epsilon=50.0,
        delta=1e-2,
        releases=(0, 1),
    ),
}


def answered(study: Any, sem: float | None) -> None:
    """A run whose trials are told with standard errors."""
    blobs = MemoryBlobs()
    sites = {n: Site(n, make_agent(study, n, SPACE, 0, blobs), None) for n in NAMES}
    engine = InProcess(sites.values())

    def exchange(outgoing: Outgoing) -> Exchanged:
        while True:
            exchanged = engine(outgoing)
            busy = [n for n, reply in exchanged.replies.items() if refusal_code(reply) == "busy"]
            if not busy:
                return exchanged
            for name in busy:
                for trial in sites[name].ask():
                    x, z = trial.parameters["x"], trial.parameters["z"]
                    assert not isinstance(x, str)
                    assert not isinstance(z, str)
                    sites[name].tell(trial.id, (x - 0.3) ** 2 + z, sem)

    with engine:
        drive(study.server(SPACE, NAMES), exchange)


@pytest.mark.parametrize("make", STUDIES.values(), ids=STUDIES.keys())
def test_models_of_points_and_messages_know_them(make: Any) -> None:
    known: list[tuple[str, Tensor | None]] = []
    answered(make(Watching(seen=known)), 0.2)
    later = [(kind, Yvar) for kind, Yvar in known if Yvar is not None and len(Yvar)]
    assert {kind for kind, _ in later} == {"point", "message"}
    for _, Yvar in later:
        torch.testing.assert_close(Yvar, torch.full_like(Yvar, 0.01))
    learnt: list[tuple[str, Tensor | None]] = []
    answered(make(Watching(seen=learnt)), None)
    assert all(Yvar is None or not len(Yvar) for _, Yvar in learnt)


def test_one_result_without_leaves_the_noise_to_be_learnt() -> None:
    seen: list[tuple[str, Tensor | None]] = []
    study = STUDIES["rows"](Watching(seen=seen))
    site = a_site(study)
    add = partial(site.attach, at(0.4), 6.0)
    add(0.1)
    assert site.agent._local_view(site.state).Yvar is not None  # type: ignore[attr-defined]
    add()
    assert site.agent._local_view(site.state).Yvar is None  # type: ignore[attr-defined]


def test_a_site_believes_what_is_exact_and_doubts_what_is_noisy() -> None:
    """Of two results at one point the model takes the one that has no noise."""
    search, space = TransferSearch(), SearchSpace(REALS)
    X = torch.tensor([[0.3, 0.5], [0.3, 0.5], [0.8, 0.5]], dtype=torch.float64)
    Y = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    for first, second in ((1e-3, 2.0), (2.0, 1e-3)):
        Yvar = torch.tensor([[first], [second], [1e-3]], dtype=torch.float64).square()
        models = search._models(space, X, Y, None, Yvar)
        assert models is not None
        mean, _ = models[0].predict(X[:1])
        assert (mean[0] > 0) == (first < second)
