r"""A local page that follows a run, and what folders hold while their processes write to them.

::

    look     the result in the folder of a run, of the hub's side of a run, or of a site
    Watch    a server on this machine that shows it as a report, anew when files have changed

The server listens on 127.0.0.1, answers GET and HEAD only, and only under a path with a random
token, which it prints: other users of the machine cannot read the page. A request for another host
is refused, so that no page of a browser reaches it by a name of its own. It locks and writes
nothing in the folder.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from botorch_fed.errors import FederatedError
from botorch_fed.report import heading, report_sections
from botorch_fed.report.page import (
    Section,
    chart_data,
    links,
    main_part,
    page,
    plotly_script,
)
from botorch_fed.run import START, RunResult

EVERY = 2000  # milliseconds between two questions of a page
SHARE = 4.0  # pause after the making of a page, in multiples of the time that it took


class FolderError(FederatedError):
    """A folder holds no run that can be shown; the message says what to do."""


def look(folder: Path) -> RunResult:
    """The result in a folder; nothing is locked or written.

    Args:
        folder: That of a run (``out``), also of the hub's side of one, or of a site.
    """
    if (folder / "site.json").is_file() or (folder / "node").is_file():
        from botorch_fed.deploy import SiteFolder

        return SiteFolder(folder.resolve()).so_far()
    try:
        if (folder / START).is_file():
            return RunResult.so_far(folder)
        if (folder / "result.json").is_file():
            return RunResult.load(folder)
    except (ValueError, KeyError, TypeError) as error:
        raise FederatedError(
            f"The files in {folder} are damaged ({type(error).__name__}: {error}): restore "
            "them from a copy, or write them again with run --resume."
        ) from error
    raise FolderError(f"The folder {folder} {_why_not(folder)}.")


def _why_not(folder: Path) -> str:
    if (folder / "hub.json").is_file():
        return "is that of a hub's process: name the folder of a run, --out of hub run"
    if (folder / "run.json").is_file():
        return "holds a run of an earlier release that has not ended: finish it with run --resume"
    return "has no result.json: expected a folder written by run(out=…)"


def _files(folder: Path) -> list[Path]:
    """The files that change while a run goes on."""
    named = [folder / name for name in (START, "result.json", "rounds.jsonl", "site.json")]
    logs = [*folder.glob("sites/*/log"), *folder.glob("*/log"), *folder.glob("*/rounds.jsonl")]
    return [path for path in (*named, *sorted(logs)) if path.is_file()]


class Watch(ThreadingHTTPServer):
    """A server of the report of a folder, for this user on this machine.

    Args:
        folder: The folder, see `look`.
        port: Its port; 0 for a free one.

    Raises:
        FederatedError: The folder holds no run, or the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._signature: tuple[Any, ...] = ()
        self._stamp = ""
        self._content: dict[str, Any] = {}
        self._sections: list[Section] = []
        self._rest_until = 0.0
        self.ended = False
        plotly_script()  # without the package, this says so
        self._refresh()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise FederatedError(
                f"Port {port} of 127.0.0.1 cannot be used ({error}): leave --port out, or name "
                "another one from 1024 to 65535."
            ) from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """The hosts that a request may be for."""
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    def page(self) -> str:
        """The whole page."""
        with self._lock:
            with suppress(FederatedError, OSError):  # the page then says why there is no news
                self._refresh()
            live = {"every": EVERY, "stamp": self._stamp}
            return page(str(self._content["heading"]), self._sections, live=live)

    def news(self, seen: str) -> dict[str, Any]:
        """What has changed since a stamp."""
        with self._lock:
            try:
                self._refresh()
            except (FederatedError, OSError) as error:
                return {"stamp": seen, "ended": False, "state": f"The folder: {error}"}
            found = {"stamp": self._stamp, "ended": self.ended, "state": self._state()}
            return found if seen == self._stamp else {**found, **self._content}

    def _state(self) -> str:
        changed = max((path.stat().st_mtime for path in _files(self.folder)), default=0.0)
        when = datetime.fromtimestamp(changed).strftime("%H:%M:%S")
        if self.ended:
            return f"The run has ended. Last written at {when}."
        return f"The run has not ended. Last written at {when}; this page follows it."

    def _refresh(self) -> None:
        """Make the content anew if files have changed, and not all the time."""
        signature = tuple(
            (str(path), path.stat().st_mtime_ns, path.stat().st_size)
            for path in _files(self.folder)
        )
        rests = bool(signature) and time.monotonic() < self._rest_until
        if self._content and (signature == self._signature or rests):
            return
        begun = time.monotonic()
        result = look(self.folder)
        self._sections = report_sections(result)
        self._content = {
            "heading": heading(result),
            "main": main_part(self._sections),
            "links": links(self._sections),
            "charts": chart_data(self._sections),
        }
        self._signature, self.ended, self._stamp = signature, result.ended, secrets.token_hex(8)
        took = time.monotonic() - begun
        self._rest_until = time.monotonic() + SHARE * took


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    server_version = "botorch-fed"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, or what is new."""
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(403, "text/plain", "This page is for 127.0.0.1 only.")
        parts = urlsplit(self.path)
        token, _, rest = parts.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(404, "text/plain", "Open the address that watch has printed.")
        if rest == "":
            return self._answer(200, "text/html", self.server.page())
        if rest == "state":
            seen = parse_qs(parts.query).get("seen", [""])[0]
            news = json.dumps(self.server.news(seen), allow_nan=False)
            return self._answer(200, "application/json", news)
        return self._answer(404, "text/plain", "There is nothing here.")

    def do_HEAD(self) -> None:
        """The same without its text."""
        self.do_GET()

    def _answer(self, code: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every two seconds."""


__all__ = ["FolderError", "Watch", "look"]
