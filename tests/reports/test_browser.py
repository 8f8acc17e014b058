"""The report in a real browser, light and dark and narrow; the screenshots are kept in artefacts/ for a person to see."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from PIL import Image

from tests.reports.hostile import HOSTILE
from truebatch.reports.live_page import LiveReport, open_server
from truebatch.reports.page import Card, Section, render_page
from truebatch.reports.plots import curves, heat_map
from truebatch.reports.tables import Table

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
KEPT = Path(__file__).parents[2] / "artefacts"
WAYS = {"light": ((1000, 1400), []), "dark": ((1000, 1400), ["--force-dark-mode"]), "narrow": ((400, 1400), [])}

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    lines = {"one by one": ([1, 2, 3], [3.0, 2.0, 1.0]), "真批次": ([1, 2, 3], [3.0, 2.0, 1.0])}
    grid = heat_map([[1.0, 2.0], [3.0, 4.0]], title="Cuts", rows=["a", "b"], columns=["1", "2"])
    wide = Table(tuple(f"column {n}" for n in range(14)), (tuple(str(10**n) for n in range(14)),) * 2)
    photo = io.BytesIO()
    Image.effect_noise((200, 120), 60).convert("RGB").save(photo, "JPEG")
    card = Card(
        title="样本-1: score 7.5", words=["answer " * 40], images=[("image/jpeg", photo.getvalue(), "before")] * 2
    )
    sections = [
        Section(title="Gallery", tables=[wide], cards=[card] * 4),
        Section(title="Loss 损失", drawn=[lambda: curves(lines, title="loss", x="step", y="loss"), lambda: grid]),
        Section(title="Hostile", tables=[Table(("words", "again"), tuple((word, word) for word in HOSTILE))]),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page("A report", sections), encoding="utf-8")
    return path


@pytest.mark.parametrize("way", WAYS)
def test_the_report_is_drawn_and_not_wider_than_the_window(page, way):
    (width, height), more = WAYS[way]
    KEPT.mkdir(exist_ok=True)
    picture = KEPT / f"report-{way}.png"
    picture.unlink(missing_ok=True)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000", *more]
    command = [str(CHROMIUM), *flags, f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    with Image.open(picture) as shown:
        assert shown.size == (width, height)
        ground = shown.convert("L").getpixel((2, height - 2))
        assert (ground < 60) == (way == "dark")
        # Nothing reaches into the margin on the right: tables and pictures keep to the window.
        margin = shown.convert("L").crop((width - 6, 0, width, height))
        assert max(abs(level - ground) for level in margin.getextrema()) < 8
        # Something is drawn in every third of the page.
        for third in range(3):
            part = shown.convert("L").crop((0, third * height // 3, width, (third + 1) * height // 3))
            assert len(part.getcolors(65536) or []) > 10


def test_nothing_in_the_page_runs(page):
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    seen = subprocess.run(command, check=True, capture_output=True, timeout=600, text=True).stdout
    assert "<script" not in seen.replace("&lt;script", "")


def test_runs_that_go_on_are_seen_side_by_side_and_the_browser_comes_back_by_itself(tmp_path):
    runs = [tmp_path / name for name in ("one_by_one", "true_batch")]
    for run in runs:
        run.mkdir()
        (run / "status.json").write_text(json.dumps({"state": "running", "step": 3, "num_steps": 90}))
        lines = [{"step": n, "loss": 3.0 / n, "tokens": 100, "seconds": 0.5, "fill": 0.9} for n in (1, 2, 3)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report, pages, is_back = LiveReport(runs, seconds=1), [], threading.Event()

    def page():
        with (runs[1] / "metrics.jsonl").open("a") as file:  # the run goes on while it is watched
            file.write(json.dumps({"step": 4 + len(pages), "loss": 0.5, "tokens": 100, "seconds": 0.5}) + "\n")
        pages.append(LiveReport.page(report))
        if len(pages) > 1:
            is_back.set()
        return pages[-1]

    report.page = page
    with open_server(report, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={tmp_path}/own",
        ]
        command = [str(CHROMIUM), *flags, f"http://127.0.0.1:{server.server_port}/"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            came_back = is_back.wait(timeout=100)
            browser.kill()
        server.shutdown()
        thread.join()
    assert came_back, "the page was loaded once, and never again"
    text = pages[-1].decode()
    assert "one_by_one: In short" in text
    assert "true_batch: In short" in text
    assert "running, 3 of 90 steps so far" in text
    assert pages[0] != pages[-1]
