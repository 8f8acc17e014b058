"""`truebatch report --watch`: the report as a page that renews itself, for browsers on this machine, read-only.

A request changes nothing and chooses nothing: whatever its address, it gets the one page or an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from truebatch.errors import ConfigError, TruebatchError
from truebatch.progress import paused
from truebatch.reports.page import Section, render_page
from truebatch.reports.report import check_names, report_sections
from truebatch.training.run_dir.run_dir import METRICS, STATUS

LOOPBACK = "127.0.0.1"
EVERY_SECONDS = 5
OWN_HOSTS = {LOOPBACK, "localhost"}


class LiveReport:
    """The page of some runs; drawn anew when a run has written something."""

    def __init__(self, runs: Sequence[Path], *, seconds: int = EVERY_SECONDS) -> None:
        self.runs, self.seconds, self.names = list(runs), seconds, check_names(runs)
        self._lock = threading.Lock()
        self._drawn: tuple[object, bytes] | None = None

    def page(self) -> bytes:
        """The page as it is now. One request at a time draws it."""
        with self._lock:
            state = self._written()
            if self._drawn is None or self._drawn[0] != state:
                self._drawn = (state, self._render())
            return self._drawn[1]

    def _written(self) -> object:
        """What changes when a run writes: sizes and times of its files."""
        files = [path for run in self.runs for path in (run / METRICS, run / STATUS, *sorted(run.glob("journal/*")))]
        return [(path, found.st_size, found.st_mtime_ns) for path in files if path.is_file() and (found := path.stat())]

    def _render(self) -> bytes:
        try:
            sections = list(report_sections(self.runs))
        except TruebatchError as error:
            sections = [Section(title="Not readable now", words=[error.wrong, error.seen])]
        return render_page(", ".join(self.names), sections, refresh_seconds=self.seconds).encode("utf-8")


def serve_report(runs: Sequence[Path], *, port: int = 0, say: Callable[[str], None]) -> None:
    """Serve the page of these runs on this machine's own address until the process is interrupted."""
    report = LiveReport(runs)
    with open_server(report, port) as server:
        say(f"report: http://{LOOPBACK}:{server.server_port}/ (renewed every {report.seconds} s; Ctrl-C ends it)")
        with paused():
            server.serve_forever()


def open_server(report: LiveReport, port: int) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        """GET / and nothing else."""

        timeout = 10

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host not in OWN_HOSTS:  # a page elsewhere whose name leads here must not read it
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send(report.page())

        def _send(self, page: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html;charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Requests are not told: there is one every few seconds."""

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"port {port} of this machine cannot be used", seen=str(error), do="leave --port out: a free one is taken"
        ) from error
