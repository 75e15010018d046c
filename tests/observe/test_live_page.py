"""The script of the page that follows a run, in a real browser: an answer that fails must not take the page away."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cadenza.evaluation.report import Report
from cadenza.evaluation.report_headline import Headline
from cadenza.evaluation.report_html import render_html
from cadenza.evaluation.report_inputs import RunInfo

pytestmark = pytest.mark.needs_browser


def page(text: str, live: str, folds: str = "") -> str:
    """A page with a headline, and at the top of it what ``folds`` holds."""
    report = Report(RunInfo(name="r"), Headline(text, "", "open"), [], [], [], None, [], [], [])
    return render_html(report, live=live).replace("<main>", f"<main>{folds}")


@contextmanager
def answering(pages: list[str], states: list[str | int]) -> Iterator[str]:
    """The address of a server that gives ``pages`` one after the other, and of ``states`` a version or an error's code;
    the last of each for good."""
    left = {
        "/": list(pages),
        "/state": [s if isinstance(s, int) else json.dumps({"version": s}) for s in states],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            queue = left.get(self.path, [404])
            told = queue.pop(0) if len(queue) > 1 else queue[0]
            if isinstance(told, int):
                self.send_error(told, "no report now", "the folder is being renamed")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(told.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


def seen(chromium: str, profile: Path, address: str) -> str:
    """The document after twenty seconds of the browser's own clock, which passes as fast as it is answered."""
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def told(dom: str) -> str:
    """What the page says about its own connection."""
    found = re.search(r'<p id="link" role="status">([^<]*)</p>', dom)
    assert found
    return found[1]


@pytest.mark.parametrize("broken", [503, "<p>half a page</p>"])
def test_one_failed_answer_takes_the_page_away_for_good(broken, chromium, tmp_path):
    old, new = page("The old page.", "v1"), page("The new page.", "v2")
    with answering([old, broken], ["v2"]) as address:
        dom = seen(chromium, tmp_path / "a", address)
    assert "The old page." in dom and "null" not in re.sub(r"<script>.*?</script>", "", dom, flags=re.DOTALL)
    assert told(dom).startswith("Waiting for the run")
    with answering([old, broken, new], [503, "v2"]) as address:
        dom = seen(chromium, tmp_path / "b", address)
    assert "The new page." in dom and told(dom) == ""


def test_what_a_reader_has_opened_is_closed_or_another_part_opened(chromium, tmp_path):
    folds = '<details data-key="{}"></details>'.format
    opened = folds("mine") + '<script>document.querySelector("[data-key=mine]").open = true</script>'
    with answering(
        [page("Old.", "v1", opened), page("New.", "v2", folds("before") + folds("mine"))], ["v2"]
    ) as address:
        dom = seen(chromium, tmp_path, address)
    assert "New." in dom
    assert '<details data-key="before">' in dom and '<details data-key="mine" open="">' in dom
