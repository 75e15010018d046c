"""``cadenza watch``: one page on this machine that follows a run.

The page asks every two seconds whether something has changed, and only then for the page. It is made at most that often
however many people look.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cadenza.core.errors import CadenzaError, ConfigError
from cadenza.evaluation.report_html import render_html
from cadenza.observe.live import live_report, version_of

LEAST_S = 2.0  # between two looks at the files
REST = 4  # times as long as the page took to make, before the next


class _Page:
    """The page as it was at most ``LEAST_S`` ago, or ``REST`` times as long as it takes to make, if that is longer:
    whoever looks takes a fifth of a core from the run at most."""

    def __init__(self, run_dir: Path, database: Path | str) -> None:
        self._run_dir, self._database = run_dir, database
        self._lock = threading.Lock()
        self._looked, self._pause_s = 0.0, LEAST_S
        self._version = ""
        self._made = ""
        self._text = ""

    def version(self) -> str:
        with self._lock:
            if time.monotonic() - self._looked >= self._pause_s:
                self._version = version_of(self._run_dir, self._database)
                self._looked = time.monotonic()
            return self._version

    def text(self) -> str:
        version = self.version()
        with self._lock:
            if version != self._made:
                begun = time.monotonic()
                self._text = render_html(live_report(self._run_dir, self._database), live=version)
                self._made, self._looked = version, time.monotonic()
                self._pause_s = max(LEAST_S, REST * (self._looked - begun))
            return self._text


class _Handler(BaseHTTPRequestHandler):
    page: _Page

    def do_GET(self) -> None:
        try:
            if self.path == "/":
                self._answer("text/html; charset=utf-8", self.page.text())
            elif self.path == "/state":
                self._answer("application/json", json.dumps({"version": self.page.version()}))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except CadenzaError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "no report now", str(error))
        except (BrokenPipeError, ConnectionResetError):  # the page was closed meanwhile
            pass
        except OSError as error:  # a stage has ended and its folder was renamed between two looks at it
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "no report now", str(error))

    def _answer(self, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data:")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to whoever started it."""


def serve(
    run_dir: Path,
    database: Path | str,
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[str, ThreadingHTTPServer], None] = lambda _address, _server: None,
) -> None:
    """Serves the page of a run until ``shutdown`` of the server is called, from another thread, or KeyboardInterrupt.

    Args:
        port: 0 takes a free one.
        on_ready: gets the address to open, and the server.

    Raises:
        ConfigError: the address cannot be used. MissingArtifact: no run there.
    """
    page = _Page(run_dir, database)
    page.text()  # says at once what is wrong with the run
    handler = type("Handler", (_Handler,), {"page": page})
    try:
        server = ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        mend = "choose another --port" if error.errno == errno.EADDRINUSE else "check --host and --port"
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}", mend) from None
    with server:
        on_ready(f"http://{host}:{server.server_address[1]}/", server)
        server.serve_forever(poll_interval=0.2)
