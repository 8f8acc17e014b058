"""The report in a real browser, light and dark and narrow; the screenshots are kept in artefacts/ for a person to see."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.reports.hostile import HOSTILE
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
