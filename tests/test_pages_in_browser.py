"""The built pages in a real browser: readable contrast, phones, headings, languages, nothing asked of other servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[1]
CHECKS = (Path(__file__).parent / "checks_of_a_page.js").read_text(encoding="utf-8")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PHONE, DESK = 375, 1280

pytestmark = [
    pytest.mark.slow,  # it builds all pages, and a browser opens each of them
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="the extra `docs` is not installed; `make docs` installs it")
    folder = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ROOT / "docs", folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    return folder


class Handler(SimpleHTTPRequestHandler):
    """The pages, the page that opens them one after the other, and the place for what it finds."""

    found: ClassVar[dict[str, Any]] = {}
    is_done = threading.Event()
    script = ""

    def do_GET(self) -> None:
        if self.path == "/checks":
            body = f"<!doctype html><body><script>{CHECKS}\n{self.script}</script></body>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        type(self).found = json.loads(body)
        self.is_done.set()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def opened(folder: Path, script: str, tmp_path: Path) -> dict[str, Any]:
    """What a script found in the pages of a folder."""
    handler = type("Handler", (Handler,), {"script": script, "is_done": threading.Event(), "found": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command = [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path}/own", "--window-size=1400,900"]
        command.append(f"http://127.0.0.1:{server.server_port}/checks")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            came = handler.is_done.wait(timeout=1800)
            browser.kill()
        server.shutdown()
        thread.join()
    assert came, "the browser said nothing"
    return handler.found


def pages_of(folder: Path) -> Iterator[str]:
    """Pages that were written, without those that Sphinx makes itself."""
    for file in sorted(folder.rglob("*.html")):
        if file.stem not in ("genindex", "search", "py-modindex") and "_static" not in file.parts:
            yield file.relative_to(folder).as_posix()


@pytest.mark.parametrize(("width", "theme"), [(PHONE, "light"), (DESK, "light"), (PHONE, "dark")])
def test_every_page_can_be_read_by_everybody(built, tmp_path, width, theme):
    ways = json.dumps([{"width": width, "theme": theme}])
    pages = list(pages_of(built))
    assert len(pages) >= 50
    assert opened(built, f"checkAll({json.dumps(pages)}, {ways})", tmp_path) == {}


def test_the_checks_find_what_they_are_for(tmp_path):
    """A page with every fault, so that none of the checks passes whatever it is given."""
    (tmp_path / "bad.html").write_text(
        "<html><body><article><h2>Second</h2><h4>Fourth</h4><p style='color: #aaa'>pale</p>"
        "<img src='none.png'><div style='width: 600px'>wide</div><input>"
        "<script src='http://127.0.0.2:9/x.js'></script></article></body></html>",
        encoding="utf-8",
    )
    script = 'checkAll(["bad.html"], [{width: 375, theme: "light"}])'
    said = "\n".join(opened(tmp_path, script, tmp_path)["bad.html 375 light"])
    for part in ("lang is", "no title", "no viewport", "headings begin", "jumps to h4", "no alt", "label", "px wide",
                 "asks elsewhere", "contrast 2.3"):  # fmt: skip
        assert part in said


SEARCH = """
(async () => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  await new Promise((done) => { frame.onload = done; frame.src = "/census.html"; });
  const page = frame.contentDocument, box = page.querySelector("article input[type=search]");
  const rows = () => [...box.parentElement.nextElementSibling.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
  const before = rows().length;
  box.value = "mamba";
  box.dispatchEvent(new Event("input"));
  const after = rows().map((row) => row.textContent.toLowerCase());
  await fetch("/found", { method: "POST", body: JSON.stringify({ before, after, said: box.nextElementSibling.textContent }) });
})()
"""


def test_the_census_can_be_searched(built, tmp_path):
    found = opened(built, SEARCH, tmp_path)
    assert found["before"] > 20
    assert 0 < len(found["after"]) < found["before"]
    assert all("mamba" in row for row in found["after"])
    assert found["said"] == f"{len(found['after'])} of {found['before']} rows"
