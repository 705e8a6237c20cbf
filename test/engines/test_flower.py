"""The Flower engine: real messages, the shipped node and site processes behind sockets.

Only Flower's network is left out, by a grid in this process; `test/test_deploy.py` has that too.
"""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import botorch_fed
from botorch_fed.engines import flower
from botorch_fed.engines.flower import FlowerExchange
from botorch_fed.engines.flower_control import ControlRefused, HubLost
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.engines.site_process import Background, SiteProcess
from botorch_fed.federation.base import Outgoing
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import FileBlobs
from test.federation.search import BoxAgent, BoxServer

NAMES = ("a", "b", "c")
NODES = {name: 1000 + i for i, name in enumerate(NAMES)}
SERVER = BoxServer(NAMES, rounds=3)
APP = Path(botorch_fed.__file__).parent / "flower_app"
Fault = Callable[[Message], Message | None]


def bowl(X: Tensor) -> Tensor:
    return -(X - 0.3).square().sum(dim=-1, keepdim=True)


def node() -> Any:
    spec = importlib.util.spec_from_file_location("flower_node", APP / "node.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NODE = node()


class LoopGrid(Grid):
    """Every message is answered as by a node at once; `fault` may change or lose its reply."""

    def __init__(self, sockets: dict[int, Path]) -> None:
        self.sockets = sockets
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.fault: Fault = lambda message: message
        self.refused: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        ids: list[str | None] = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.refused:
                ids.append(None)
                continue
            self.sent.append(message)
            name = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            reply = self.fault(NODE.answer(message, self.sockets[node]))
            if reply is not None:
                self.replies[name] = reply
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **options: Any) -> Any: ...

    def get_node_ids(self) -> Iterable[int]:
        return list(self.sockets)

    def send_and_receive(self, *args: Any, **options: Any) -> Any: ...


class Machines:
    """Three sites, each behind its socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sites: dict[str, Site] = {}
        self.processes: dict[str, SiteProcess] = {}
        self.grid = LoopGrid({NODES[name]: folder / name / "socket" for name in NAMES})

    def start(self, name: str, objective: Any = bowl) -> None:
        home = self.folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        log = FileLog(home / "log", SITE_EVENTS)
        agent = BoxAgent(seed=NAMES.index(name), blobs=FileBlobs(home / "blobs"))
        site = self.sites[name] = Site(name, agent, objective, log=log)
        process = self.processes[name] = SiteProcess(site, home / "socket")
        threading.Thread(target=process.serve, daemon=True).start()

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.stop()
        process.close()

    def points(self, name: str) -> Tensor:
        return torch.cat([observation.X for observation in self.sites[name].observations()])


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    for field in ("_task_id", "_run_id", "_node_id"):  # as Flower sets them in a ServerApp
        monkeypatch.setattr(TaskIdentity, field, 1)
    made = Machines(tmp_path)
    for name in NAMES:
        made.start(name)
    yield made
    for name in list(made.processes):
        made.stop(name)


def exchange(machines: Machines, **options: Any) -> FlowerExchange:
    return FlowerExchange(machines.grid, NODES, **{"deadline": 5.0, "absence": 0.0, **options})


def test_a_run_is_a_run_in_process(machines: Machines) -> None:
    rounds: list[Round] = []
    far = drive(SERVER, exchange(machines), on_round=rounds.append)
    sites = [Site(name, BoxAgent(seed=NAMES.index(name)), bowl) for name in NAMES]
    again: list[Round] = []
    near = drive(SERVER, InProcess(sites), on_round=again.append)
    assert torch.equal(far.best.X, near.best.X)
    for site in sites:
        there = torch.cat([observation.X for observation in site.observations()])
        assert torch.equal(machines.points(site.name), there)
    for one, other in zip(rounds, again, strict=True):
        assert one.exchanged.bytes_down == other.exchanged.bytes_down
        assert one.exchanged.bytes_up == other.exchanged.bytes_up


def test_a_round_is_one_exchange_that_ends_with_its_deadline(machines: Machines) -> None:
    drive(SERVER, exchange(machines, deadline=7.0))
    assert len(machines.grid.sent) == 3 * SERVER.rounds
    for message in machines.grid.sent:
        assert 6.0 < message.metadata.ttl <= 7.0
        assert message.metadata.message_type == "query.respond"


def test_an_error_reply_is_matched_by_its_message(machines: Machines) -> None:
    def dead(reply: Message) -> Message:
        if reply.metadata.src_node_id != NODES["b"]:
            return reply
        about = reply.metadata.reply_to_message_id  # Flower sends it from node 1
        return Message(
            metadata=Metadata(1, "", 1, 1, about, "", 0.0, 9.0, "query.respond"),
            error=Error(code=5, reason="the words of a node: 700 degrees"),
        )

    machines.grid.fault = dead
    rounds: list[Round] = []
    drive(SERVER, exchange(machines), on_round=rounds.append)
    for round_ in rounds:
        assert round_.replied == ("a", "c")
        failure = round_.exchanged.failures["b"]
        assert failure.code == "absent"
        assert "700" not in str(failure)


def test_silence_costs_the_deadline_and_the_agent_only(machines: Machines) -> None:
    lost = NODES["c"]
    machines.grid.fault = lambda m: None if m.metadata.src_node_id == lost else m
    rounds: list[Round] = []
    drive(SERVER, exchange(machines, deadline=0.5), on_round=rounds.append)
    assert [round_.replied for round_ in rounds] == [("a", "b")] * 3
    assert {round_.exchanged.failures["c"].code for round_ in rounds} == {"absent"}


def test_who_was_away_comes_back(machines: Machines) -> None:
    engine = exchange(machines)
    rounds: list[Round] = []

    def carry(outgoing: Outgoing) -> Any:
        if outgoing.serial == 2:
            machines.stop("b")
        if outgoing.serial == 3:
            machines.start("b")
        return engine(outgoing)

    drive(SERVER, carry, on_round=rounds.append)
    assert [round_.replied for round_ in rounds] == [NAMES, ("a", "c"), NAMES]
    failure = rounds[1].exchanged.failures["b"]
    assert str(failure) == "absent: the site process does not run"


def test_a_site_that_comes_within_its_time_loses_nothing(machines: Machines) -> None:
    """It is restarted in the middle of a round; the round waits."""
    machines.stop("b")
    threading.Timer(1.0, machines.start, ["b"]).start()
    rounds: list[Round] = []
    drive(SERVER, exchange(machines, absence=10.0, deadline=20.0), on_round=rounds.append)
    assert [round_.replied for round_ in rounds] == [NAMES] * 3


def test_a_site_that_is_gone_is_waited_for_once(machines: Machines) -> None:
    machines.stop("b")
    rounds: list[tuple[float, Round]] = []
    begun = time.monotonic()
    engine = exchange(machines, absence=1.0, deadline=20.0)
    drive(SERVER, engine, on_round=lambda r: rounds.append((time.monotonic() - begun, r)))
    assert [round_.replied for _, round_ in rounds] == [("a", "c")] * 3
    first, last = rounds[0][0], rounds[2][0]
    assert first > 1.0  # asked a second time
    assert last - first < 2.0


def test_a_reply_that_never_arrives_holds_nobody_up(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node announces a reply and does not send it: Flower waits for it, for minutes."""
    monkeypatch.setattr(flower, "STUCK", 0.3)
    release = threading.Event()
    pull = machines.grid.pull_messages

    def stalled(message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(pull(message_ids))
        if any(message.metadata.src_node_id == NODES["a"] for message in found):
            release.wait(20)
        return found

    machines.grid.pull_messages = stalled  # type: ignore[method-assign]
    rounds: list[Round] = []
    begun = time.monotonic()
    drive(BoxServer(NAMES, rounds=2), exchange(machines, deadline=1.5), on_round=rounds.append)
    assert time.monotonic() - begun < 8.0
    assert [round_.replied for round_ in rounds] == [("b", "c")] * 2
    release.set()


def test_a_reply_that_flower_cannot_read_is_its_senders_loss(machines: Machines) -> None:
    pull = machines.grid.pull_messages

    def unreadable(message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(pull(message_ids))
        if any(message.metadata.src_node_id == NODES["b"] for message in found):
            raise ValueError("Error parsing message: 700 degrees")
        return found

    machines.grid.pull_messages = unreadable  # type: ignore[method-assign]
    rounds: list[Round] = []
    drive(SERVER, exchange(machines), on_round=rounds.append)
    assert [round_.replied for round_ in rounds] == [("a", "c")] * 3
    failure = rounds[0].exchanged.failures["b"]
    assert str(failure) == "malformed: Flower cannot read it: ValueError"


def test_a_site_that_lost_its_broadcasts_gets_them_again(machines: Machines) -> None:
    class Steady(BoxServer):
        def outbox(self, state: Any) -> Any:
            made = super().outbox(state)
            return made and type(made)(made.messages, SAME)

    from test.federation.search import Plan

    SAME = (Plan(0.7),)
    engine = exchange(machines)

    def carry(outgoing: Outgoing) -> Any:
        if outgoing.serial == 2:
            machines.sites["b"].agent.blobs.keep([])
        return engine(outgoing)

    rounds: list[Round] = []
    drive(Steady(NAMES, rounds=3), carry, on_round=rounds.append)
    assert [round_.replied for round_ in rounds] == [NAMES] * 3
    down = [round_.exchanged.bytes_down for round_ in rounds]
    assert down[1]["b"] > 2 * down[1]["a"]  # asked twice, the second time with everything
    assert len(machines.grid.sent) == 3 * 3 + 1


def test_a_busy_site_is_asked_again_until_it_has_its_values(machines: Machines) -> None:
    ready = threading.Event()

    def slow(X: Tensor) -> Tensor:
        assert ready.wait(20)
        return bowl(X)

    machines.stop("a")
    machines.start("a", Background(slow, patience=0.05))
    threading.Timer(1.5, ready.set).start()
    rounds: list[Round] = []
    drive(BoxServer(NAMES, rounds=1), exchange(machines, deadline=20.0), on_round=rounds.append)
    assert rounds[0].replied == NAMES
    asked = [m for m in machines.grid.sent if m.metadata.dst_node_id == NODES["a"]]
    assert 2 <= len(asked) <= 5


def test_a_site_that_stays_busy_is_left_behind(machines: Machines) -> None:
    block = threading.Event()

    def slow(X: Tensor) -> Tensor:
        block.wait(20)
        return bowl(X)

    machines.stop("a")
    machines.start("a", Background(slow, patience=0.01))
    rounds: list[Round] = []
    drive(BoxServer(NAMES, rounds=1), exchange(machines, deadline=1.0), on_round=rounds.append)
    block.set()
    assert rounds[0].replied == ("b", "c")
    assert rounds[0].exchanged.failures["a"].code == "busy"


def test_nodes_that_flower_does_not_accept(machines: Machines) -> None:
    machines.grid.refused = {NODES["a"]}
    rounds: list[Round] = []
    drive(BoxServer(NAMES, rounds=1), exchange(machines), on_round=rounds.append)
    assert rounds[0].replied == ("b", "c")
    assert "does not accept" in str(rounds[0].exchanged.failures["a"])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"code": "failed"}, "failed"),
        ({"code": "the words of a node: 700 degrees"}, "malformed"),
        ({"answer": "text"}, "malformed"),
        ({"answer": [b"a", b"b"]}, "malformed"),
        ({"answer": b"x" * 200_000}, "malformed"),
        ({"answer": b"no frame"}, "malformed"),
        ({}, "malformed"),
    ],
)
def test_replies_that_a_node_makes_up(
    machines: Machines, fields: dict[str, Any], code: str
) -> None:
    def forge(reply: Message) -> Message:
        if reply.metadata.src_node_id == NODES["b"]:
            reply.content["reply"] = ConfigRecord(fields)
        return reply

    machines.grid.fault = forge
    rounds: list[Round] = []
    server = BoxServer(NAMES, rounds=1)
    drive(server, exchange(machines, max_bytes=100_000), on_round=rounds.append)
    assert rounds[0].replied == ("a", "c")
    failure = rounds[0].exchanged.failures["b"]
    assert failure.code == code
    assert "700" not in str(failure)


def test_a_node_with_other_records(machines: Machines) -> None:
    def forge(reply: Message) -> Message:
        if reply.metadata.src_node_id == NODES["b"]:
            del reply.content["reply"]
        return reply

    machines.grid.fault = forge
    rounds: list[Round] = []
    drive(BoxServer(NAMES, rounds=1), exchange(machines), on_round=rounds.append)
    assert rounds[0].replied == ("a", "c")


def test_an_agent_without_a_node_is_unknown(machines: Machines) -> None:
    engine = FlowerExchange(machines.grid, {"a": NODES["a"]}, deadline=5)
    rounds: list[Round] = []
    drive(BoxServer(("a", "b"), rounds=1), engine, on_round=rounds.append)
    assert rounds[0].exchanged.failures["b"].code == "unknown"


def test_settings_are_checked(machines: Machines) -> None:
    for deadline in (0.0, float("inf"), float("nan")):
        with pytest.raises(InputDataError, match="deadline > 0 seconds"):
            exchange(machines, deadline=deadline)
    with pytest.raises(InputDataError, match="absence >= 0 seconds"):
        exchange(machines, absence=-1.0)
    with pytest.raises(InputDataError, match="one node"):
        FlowerExchange(machines.grid, {"a": 1, "b": 1})


def test_a_node_answers_requests_and_nothing_else(machines: Machines) -> None:
    for kind in ("query.evil", "train", "query"):
        message = Message(RecordDict({"request": ConfigRecord({})}), NODES["a"], kind)
        reply = NODE.answer(message, machines.grid.sockets[NODES["a"]])
        assert reply.has_error()
        assert reply.error.reason == 'A site answers "query.respond" and nothing else.'


def test_a_request_without_its_fields_is_answered_by_a_word(machines: Machines) -> None:
    fields = ConfigRecord({"body": "text", "blobs": [b"a"], "seconds": 1.0, "defer": False})
    for content in (RecordDict(), RecordDict({"request": fields})):
        message = Message(content, NODES["a"], "query.respond")
        reply = NODE.answer(message, machines.grid.sockets[NODES["a"]])
        assert dict(reply.content["reply"]) == {"code": "absent"}


@pytest.mark.parametrize("at", ["push_messages", "pull_messages"])
def test_a_hub_that_is_lost_ends_the_run(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """And is nobody's failure: no site is blamed for it in the record."""

    def lost(*_: object) -> Any:
        raise HubLost("The hub does not answer.")

    monkeypatch.setattr(machines.grid, at, lost)
    rounds: list[Round] = []
    with pytest.raises(HubLost, match="does not answer"):
        drive(SERVER, exchange(machines), on_round=rounds.append)
    assert rounds == []


def test_messages_that_the_hub_does_not_take_are_their_sites_absence(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those that expire on their way; the round goes on, and the run."""
    push, tries = machines.grid.push_messages, []

    def refusing(messages: Iterable[Message]) -> Iterable[str | None]:
        tries.append(len(list(messages)))
        if len(tries) == 1:
            raise ControlRefused("Message TTL has expired")
        return push(messages)

    monkeypatch.setattr(machines.grid, "push_messages", refusing)
    rounds: list[Round] = []
    engine = exchange(machines, absence=10.0, deadline=20.0)
    drive(BoxServer(NAMES, rounds=1), engine, on_round=rounds.append)
    assert tries == [3, 3]
    assert rounds[0].replied == NAMES


def test_nobody_is_asked_again_at_the_deadline(machines: Machines) -> None:
    """A message would expire before its node has it."""
    machines.stop("b")
    rounds: list[Round] = []
    engine = exchange(machines, absence=10.0, deadline=2.4)
    drive(BoxServer(NAMES, rounds=1), engine, on_round=rounds.append)
    assert rounds[0].replied == ("a", "c")
    asked = [m.metadata.ttl for m in machines.grid.sent if m.metadata.dst_node_id == NODES["b"]]
    assert len(asked) == 2
    assert min(asked) >= 1.0


@pytest.mark.parametrize("name", ["node.py", "hub.py"])
def test_processes_that_stand_alone(name: str) -> None:
    """They run by their path, with nothing of this package, and nothing that runs an app."""
    text = (APP / name).read_text()
    assert not re.search(r"^\s*(from|import) (botorch|torch)", text, re.MULTILINE)
    for word in ("install_from_fab", "get_fab", "GetFab", "superexec", "load_app", "subprocess"):
        assert word not in text.replace("superexec_auth_secret=None", "")
    assert {path.name for path in APP.iterdir() if path.is_file()} == {"node.py", "hub.py"}
