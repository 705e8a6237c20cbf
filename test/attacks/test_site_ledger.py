"""A site's own ledger: durable across studies, and an older copy of it is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from botorch_fed.cli import main
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.agent import bound_to, paying
from botorch_fed.federation.anchors import Anchors, SealedLedger
from botorch_fed.federation.base import Anchored, Exchanged, Outgoing
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.privacy import Budget, Event, SharedLedger
from botorch_fed.storage.store import FileStore, MemoryBlobs, MemoryStore
from botorch_fed.studies import PrivateUCB
from test.faults.cases import ARMS, NAMES, PHI, SQUARE, hill

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = Budget(3.5, 1e-5)
WIDE = Budget(20.0, 1e-5)


def study() -> PrivateUCB:
    return PrivateUCB(
        budget=2,
        trust="local",
        unit="agent",
        epsilon=2.0,
        feature_map=PHI,
        noise_var=0.1,
        candidates=ARMS,
        require=Budget(2.0, 1e-5),
    )


def ledger(folder: Path, name: str, limit: Budget = LIMIT) -> SharedLedger:
    return SharedLedger(
        folder / f"{name} ledger", adjacency="replace-one", unit="agent", budget=limit
    )


def played(folder: Path, run: str, anchors: Anchors, limit: Budget = LIMIT) -> dict[str, str]:
    """A study of three sites; why each has refused to the end, if it has."""
    server = study().server(SQUARE, NAMES)
    sites = {}
    for seed, name in enumerate(NAMES):
        books = SealedLedger(ledger(folder, name, limit), name, FileStore(folder / f"{name} site"))
        agent: Any = bound_to(study().agent(name, SQUARE, seed, MemoryBlobs()), NAMES)
        agent = paying(agent, books.ledger, f"{run} {name}")
        sites[name] = Site(name, agent, hill, run=run, ledger=books)
    failures: dict[str, str] = {}

    def exchange(outgoing: Outgoing) -> Exchanged:
        replies = {}
        for name, request in outgoing.requests.items():
            for data in outgoing.blobs.values():
                sites[name].agent.blobs.put(data)
            replies[name] = sites[name].respond(request)
        return Exchanged(replies)

    try:
        drive(
            server,
            exchange,
            run=run,
            anchors=anchors,
            on_round=lambda r: failures.update(
                {k: f.code for k, f in r.exchanged.failures.items()}
            ),
        )
    finally:
        for site in sites.values():
            site.close()
    return failures


def test_the_third_study_finds_the_ledger_used_up(tmp_path: Path) -> None:
    seen = Anchors(MemoryStore())
    assert played(tmp_path, "first", seen) == {}
    with ledger(tmp_path, "bob") as books:
        assert len(books.ledger.entries) == 1
        once = books.guarantee().epsilon
    assert once == pytest.approx(2.0, rel=1e-3)
    assert played(tmp_path, "second", seen) == {}
    assert played(tmp_path, "third", seen).keys() == set(NAMES)
    with ledger(tmp_path, "bob") as books:
        assert once < books.guarantee().epsilon <= LIMIT.epsilon


def test_a_run_that_goes_on_pays_once(tmp_path: Path) -> None:
    with ledger(tmp_path, "bob") as books:
        for _ in range(3):
            books.spend_once(Event(8.0), count=2, note="run a")
        assert books.releases == 2


@pytest.mark.parametrize("keeper", ["hub", "peers", "the site's other folder"])
def test_an_older_copy_of_a_ledger_is_noticed(tmp_path: Path, keeper: str) -> None:
    seen = Anchors(FileStore(tmp_path / "hub"))
    played(tmp_path, "first", seen, WIDE)
    shutil.copytree(tmp_path / "bob ledger", tmp_path / "backup")
    shutil.copytree(tmp_path / "bob site", tmp_path / "site before")
    played(tmp_path, "second", seen, WIDE)
    shutil.rmtree(tmp_path / "bob ledger")
    shutil.copytree(tmp_path / "backup", tmp_path / "bob ledger")
    if keeper == "the site's other folder":
        with pytest.raises(ProtocolError, match=r"restored from an older copy.*newest copy"):
            played(tmp_path, "third", Anchors(MemoryStore()), WIDE)
        return
    shutil.rmtree(tmp_path / "bob site")  # the whole machine was restored
    shutil.copytree(tmp_path / "site before", tmp_path / "bob site")
    lost = keeper == "peers"  # the hub too
    seen = Anchors(MemoryStore() if lost else FileStore(tmp_path / "hub"))
    with ledger(tmp_path, "bob", WIDE) as books:
        before = len(books)
    failures = played(tmp_path, "third", seen, WIDE)
    assert failures == {"bob": "ledger"}
    with ledger(tmp_path, "bob", WIDE) as books:  # peers speak with their first reply
        assert len(books) - before == (keeper == "peers")


def test_nobody_else_can_make_up_an_anchor(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "site")
    with ledger(tmp_path, "bob") as one:
        books = SealedLedger(one, "bob", store)
        (mine,) = books.anchors()
        made_up = Anchored("bob", mine.ledger, 10**6, "a" * 64, "b" * 64)
        books.check([made_up])
        books.check([mine])
        seen = Anchors(MemoryStore())
        seen.hear("ann", [made_up])
        seen.hear("bob", [mine])
        assert set(seen.all()) == {made_up, mine}  # a false one takes nothing away
        one.spend(Event(4.0))
        books.check([mine])


def test_the_ledger_at_the_command_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bob ledger"
    with ledger(tmp_path, "bob") as books:
        books.spend(Event(8.0), note="[/b] pilot")
    assert main(["ledger", "show", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["budget"] == [3.5, 1e-5]
    assert 0 < said["spent"] < 3.5
    assert said["events"] == 2
    assert main(["ledger", "limit", str(path), "--epsilon", "9", "--delta", "1e-5"]) != 0
    assert "--raise" in capsys.readouterr().err
    assert main(["ledger", "limit", str(path), "--epsilon", "3", "--delta", "1e-5"]) == 0
    assert "[/b] pilot" in capsys.readouterr().out
    with SharedLedger.at(path) as books:
        assert books.budget == Budget(3.0, 1e-5)
    with ledger(tmp_path, "bob") as books:  # a study names what it was made with
        assert books.budget == Budget(3.0, 1e-5)
    assert main(["ledger", "show", str(tmp_path / "nothing")]) != 0
    assert "no folder of a ledger" in capsys.readouterr().err
