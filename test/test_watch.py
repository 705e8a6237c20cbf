"""A page follows a run while its process writes, and nobody else can read it."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from botorch_fed.acquisition import Constant
from botorch_fed.errors import FederatedError, ProtocolError
from botorch_fed.run import START, RunResult, run
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import FTS
from botorch_fed.study import StudyFile, read_study
from botorch_fed.watch import FolderError, Watch, look

pytest.importorskip("plotly")

SPACE = SearchSpace(
    (Parameter.real("rate", 1e-4, 1.0, scale="log"), Parameter.integer("depth", 1, 8))
)
CHEAP = Strategy(num_raw=32, num_restarts=2, num_features=32, schedule=Constant(0.5), prior_until=2)
STUDY = """
objective = "ask"
agents = ["north", "south"]
budget = 2
seed = 0
[space]
rate = { type = "real", lower = 1e-4, upper = 1.0, log = true }
depth = { type = "integer", lower = 1, upper = 8 }
[protocol]
name = "fts"
"""


def _run(folder: Path, at_third: Callable[[], None], **options: Any) -> RunResult:
    """A run whose third evaluation calls a function first."""
    calls = []

    def objective(X: Tensor) -> Tensor:
        calls.append(X)
        if len(calls) == 3:
            at_third()
        return X.square().sum(dim=-1, keepdim=True)

    study = FTS(budget=3, strategy=CHEAP, every=1)
    sites = {"a": objective, "b": objective}
    return run(study, sites, space=SPACE, seed=0, out=folder, progress=False, **options)


@contextmanager
def _serving(folder: Path) -> Iterator[Watch]:
    with Watch(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _asked(
    server: Watch, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def _news(server: Watch, seen: str) -> dict[str, Any]:
    code, text, _ = _asked(server, f"/{server.token}/state?seen={seen}")
    assert code == 200
    found: dict[str, Any] = json.loads(text)
    return found


def _contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    folder, found = tmp_path / "run", {}

    def in_the_middle() -> None:
        before = _contents(folder)
        found["result"] = look(folder)
        with _serving(folder) as server:
            found["page"] = _asked(server, f"/{server.token}/")
            found["news"] = _news(server, "")
            found["same"] = _news(server, found["news"]["stamp"])
        assert _contents(folder) == before  # the log is locked, and stays as it is

    result = _run(folder, in_the_middle)
    middle = found["result"]
    assert not middle.ended
    assert len(middle.records) == 2
    known = [{key: row[key] for key in middle.records[0]} for row in result.records]
    assert all({**row, "true": None, "regret": None} in [
        {**one, "true": None, "regret": None} for one in known] for row in middle.records
    )  # fmt: skip
    code, text, headers = found["page"]
    assert code == 200
    assert "The run has not ended." in text
    assert "connect-src 'self'" in text
    assert headers["Cache-Control"] == "no-store"
    assert found["news"]["ended"] is False
    assert "2 evaluations" in found["news"]["main"]
    assert set(found["news"]["charts"]) == {
        "convergence",
        "agents",
        "slices",
        "parallel",
        "communication",
    }
    assert "main" not in found["same"]
    assert not (folder / START).exists()
    with _serving(folder) as server:
        last = _news(server, found["news"]["stamp"])
        assert (last["ended"], server.ended) == (True, True)
        assert "The run has ended." in last["state"]
        assert "The run has not ended." not in last["main"]
        assert f"{len(result.records)}" in last["main"]


def test_a_page_shows_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(folder, stop)
    with _serving(folder) as server:
        first = _news(server, "")
        assert "2 evaluations" in first["main"]
        _run(folder, lambda: None, resume=True)
        deadline = time.monotonic() + 60
        while not (news := _news(server, first["stamp"]))["ended"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert news["stamp"] != first["stamp"]
        assert "of 6" in news["main"]
        shutil.rmtree(folder)
        assert "no result.json" in _news(server, news["stamp"])["state"]
        assert "of 6" in _asked(server, f"/{server.token}/")[1]  # what was there before


def test_nobody_else_reads_or_writes(tmp_path: Path) -> None:
    _run(tmp_path / "run", lambda: None)
    with _serving(tmp_path / "run") as server:
        page = f"/{server.token}/"
        assert server.server_address[0] == "127.0.0.1"
        assert _asked(server, page, Host=f"localhost:{server.server_port}")[0] == 200
        for host in ("example.org", "127.0.0.1", f"127.0.0.1.example.org:{server.server_port}"):
            code, text, _ = _asked(server, page, Host=host)
            assert code == 403
            assert "FTS" not in text
        for path in (
            "/",
            "/state",
            f"/{server.token[:-1]}/",
            f"/x{page}",
            "//",
        ):
            assert _asked(server, path)[0] == 404, path
        for path in ("../run.json", "run.json", "%2e%2e/run.json", "state/x"):
            assert _asked(server, page + path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert _asked(server, page, method)[0] == 501
        code, text, headers = _asked(server, page, "HEAD")
        assert (code, text) == (200, "")
        assert int(headers["Content-Length"]) > 1_000_000


def test_a_port_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    _run(tmp_path / "run", lambda: None)
    taken = pytest.raises(FederatedError, match=r"Port \d+ of 127.0.0.1 cannot be used")
    with _serving(tmp_path / "run") as server, taken:
        Watch(tmp_path / "run", server.server_port)
    with pytest.raises(FederatedError, match="leave --port out"):
        Watch(tmp_path / "run", 70000)


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"has no result\.json"):
        look(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(FolderError, match="of an earlier release"):
        look(tmp_path)
    (tmp_path / "hub.json").write_text("{}")
    with pytest.raises(FolderError, match="--out of hub run"):
        Watch(tmp_path)
    (tmp_path / START).write_text("{}")
    with pytest.raises(FederatedError, match="are damaged"):
        look(tmp_path)


def test_the_hubs_side_of_a_run_knows_no_points(tmp_path: Path) -> None:
    _run(tmp_path / "run", lambda: None)
    head = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / START).write_text(json.dumps({**head, "part": "hub"}))
    result = look(tmp_path / "run")
    assert (result.part, result.ended, result.records) == ("hub", False, [])
    assert result.rounds
    with _serving(tmp_path / "run") as server:
        main = _news(server, "")["main"]
    assert "the hub cannot say whether the messages have helped" in main
    assert "exchanges" in main


def test_a_site_is_shown_while_its_process_holds_the_log(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from botorch_fed.deploy import DeployError, SiteFolder

    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    study: StudyFile = read_study(path)
    site = SiteFolder.create(tmp_path / "site")
    with pytest.raises(DeployError, match="no study yet"):
        look(site.folder)
    with site._remembered(study, "north"), site.site(study, "north") as opened:
        opened.attach({"rate": 0.01, "depth": 3}, 0.5, label="earlier")
        with pytest.raises(ProtocolError, match="is open already"):
            site.site(study, "north")
        result = look(site.folder)
        opened.attach({"rate": 0.1, "depth": 4}, 0.25)
        opened.attach({"rate": 0.1, "depth": 5}, 0.25)  # two of them use no budget of two
        later = look(site.folder)
    assert (result.part, result.names, result.ended) == ("site", ("north",), False)
    assert result.best_parameters("north") == {"rate": pytest.approx(0.01), "depth": 3}
    assert [len(one.records) for one in (result, later)] == [1, 3]
    assert (later.ended, later.spent("north")) == (False, 0.0)
    rows = [{**row, "status": "completed"} for row in later.records]
    assert replace(later, records=rows).spent("north") == 3.0
    assert site.result(study, "north").records == later.records
    assert later.sees is not None
    study.path.write_text(STUDY.replace("seed = 0", "seed = 1"))
    with pytest.raises(DeployError, match="unchanged"):
        look(site.folder)


@pytest.mark.nightly
def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    _run(tmp_path / "run", lambda: None)
    command = [sys.executable, "-m", "botorch_fed.cli", "watch", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert err == ""


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on PATH")
def test_a_browser_follows_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(folder, stop)
    assert BROWSER is not None
    with _serving(folder) as server:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
        browser = subprocess.Popen(
            [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=60000", "--dump-dom", server.url],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _run(folder, lambda: None, resume=True)
            out, err = browser.communicate(timeout=120)
        finally:
            browser.kill()
    assert "The run has ended." in out
    assert out.count('class="main-svg"') >= 5
    assert not [line for line in err.splitlines() if "CONSOLE" in line]
