"""What `fit`, `verify`, planning and scoring leave in a folder is in its report, in the page and in the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.reports.hostile import HOSTILE
from tests.reports.test_report import harmless
from truebatch.cli.app import run as truebatch
from truebatch.errors import DataError
from truebatch.planning.lengths.measured_values import Measured
from truebatch.reports import plots
from truebatch.reports.artifacts import keep_gallery
from truebatch.reports.gallery import Exhibit, make_card, small_picture
from truebatch.reports.report import print_report, report_sections, write_report
from truebatch.reports.sections.run import is_run
from truebatch.reports.sections.scores import SHOWN, choose_shown
from truebatch.reports.sections.verification import VERIFICATION, keep_verification, proof_sections
from truebatch.training.run_dir.resume_checks import LENGTHS, MOST_LENGTHS, check_data
from truebatch.training.run_dir.run_dir import RunFolder

DIFFERENCE = {"part": "outputs", "value": 3e-3, "limit": 1e-5, "where": "sample 2"}
ARRANGEMENT = {"layout": "right", "error": "", "moved_samples": [2], "differences": [DIFFERENCE]}
FOUND = {
    "verdict": "broken", "ok": False, "unproven": "", "mode": "eval", "limits": {}, "leaks": [], "leak_visible": 1.0,
    "arrangements": [{**ARRANGEMENT, "name": "right padded", "verdict": "different"}],
    "causes": [{"name": "mask", "words": "the mask is not used", "fix": "hand it on"}],
    "first_module": {"name": "encoder.0", "kind": "Linear", "sample": 2, "value": 0.1}, "notes": ["a note"],
}  # fmt: skip
POINT = {"cells": 10, "pairs": 100, "samples": 1, "num_bytes": 2**20}
FIT = {
    "points": [POINT, {**POINT, "cells": 20, "num_bytes": 2**21}], "uncertainty": 0.02, "floor": 0.0, "fixed": 0.0,
    "per_cell": 104857.6, "per_pair": 0.0, "per_sample": 0.0, "resident_bytes": 2**30, "optimiser_bytes": 0, "facts": {},
    "limits": {"24 GiB": 24 * 2**30}, "cells": {"24 GiB": 123_456}, "longest": 20, "shortest": 3,
    "sizes": [
        {"samples": n, "samples_per_second": 10.0 * n, "slowest_per_second": 9.0 * n, "typical_bytes": n << 28,
         "worst_bytes": n << 29}
        for n in (1, 2, 64)
    ],
}  # fmt: skip


def terminal(*runs: Path) -> str:
    out = io.StringIO()
    print_report(runs, out)
    return out.getvalue()


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    """A scoring run over pictures, hostile names and two samples that fail."""
    folder = tmp_path_factory.mktemp("scored")
    rows = []
    for n in range(60):
        Image.new("RGB", (40 + n, 30), (4 * n, 90, 120)).save(folder / f"{n}.png")
        words = HOSTILE[n].encode("utf-8", "replace").decode().replace("\0", "") or "x"
        rows.append({"id": words, "user": f"{words} ?", "image": f"{n}.png", "options": {"score": n / 10}})
    (folder / "broken.png").write_bytes(b"not a picture")
    rows[3]["image"], rows[4]["options"] = "broken.png", {"fail": "nan"}
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert (
        truebatch(["score", str(data), "--model", "scripted", "--yesno", "--out", str(folder / "run"), "--no-check"])
        == 3
    )
    return folder / "run"


def test_a_scoring_run_has_counts_failures_scores_and_a_gallery_with_pictures(scored):
    text = write_report([scored]).read_text(encoding="utf-8")
    harmless(text)
    for words in ("decode/unreadable_image", "Failures", "Scores", "Gallery", "scripted"):
        assert words in text
    assert text.count("<img") >= SHOWN
    assert text.count("<article>") == SHOWN + 2
    told = terminal(scored)
    assert "highest" in told
    assert "unreadable_image" in told
    assert "\x1b" not in told


def test_pictures_of_another_dataset_are_not_shown(scored, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for path in scored.iterdir():
        if path.is_dir():
            (copy / path.name).mkdir()
            for one in path.iterdir():
                (copy / path.name / one.name).write_bytes(one.read_bytes())
        elif not path.name.startswith("."):
            (copy / path.name).write_bytes(path.read_bytes())
    call = json.loads((copy / "call.json").read_text())
    other = tmp_path / "other.jsonl"
    other.write_text('{"user": "something else"}\n' * 60)
    (copy / "call.json").write_text(json.dumps({**call, "data": str(other)}))
    text = write_report([copy]).read_text(encoding="utf-8")
    assert "<img" not in text
    assert "something else" not in text


def test_samples_of_a_gallery_go_from_the_lowest_score_to_the_highest():
    scores = [float((7 * n) % 101) for n in range(101)]
    chosen = choose_shown(scores, range(101))
    assert len(chosen) == SHOWN
    shown = [scores[at] for at in chosen]
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (0.0, 100.0)


def test_several_scoring_runs_stand_beside_each_other(scored, tmp_path):
    text = write_report([scored, scored], tmp_path / "both.html").read_text(encoding="utf-8")
    harmless(text)
    assert "Scores of the runs" in text


def test_a_kept_gallery_shows_pictures_of_its_run_and_none_from_elsewhere(tmp_path):
    (tmp_path / "run" / "pictures").mkdir(parents=True)
    Image.new("RGB", (300, 20), "red").save(tmp_path / "run" / "pictures" / "a.png")
    Image.new("RGB", (300, 20), "red").save(tmp_path / "secret.png")
    images = [(Path("pictures/a.png"), "before"), (Path("../secret.png"), "after"), (Path("pictures/none.png"), "gone")]
    keep_gallery(
        tmp_path / "run", "60-gallery", [Exhibit(title="one", words=["w" * 1000], images=images)], title="Pairs"
    )
    text = write_report([tmp_path / "run"]).read_text(encoding="utf-8")
    harmless(text)
    assert text.count("<img") == 1
    assert "gone: cannot be read" in text
    assert "w" * 401 not in text
    (tmp_path / "run" / "findings" / "60-gallery.json").write_text('{"gallery": 3, "title": "x"}')
    with pytest.raises(DataError, match="does not hold a gallery"):
        write_report([tmp_path / "run"])


def test_a_small_picture_is_small_and_what_is_none_is_said():
    assert len(make_card(Exhibit(title="t", images=[(Image.new("RGB", (9, 9)), "")] * 9)).images) == 4
    found = small_picture(Image.effect_noise((2000, 1000), 90))
    with Image.open(io.BytesIO(found)) as small:
        assert max(small.size) == 200
    assert "cannot be read" in small_picture(b"nothing")


def test_a_verification_is_kept_and_shown(tmp_path):
    keep_verification(tmp_path / "run", FOUND)
    assert is_run(tmp_path / "run")
    told = terminal(tmp_path / "run")
    for words in (
        "BROKEN",
        "right padded",
        "different",
        "3.0e-03",
        "likely cause: the mask is not used",
        "do: hand it on",
    ):
        assert words in told
    harmless(write_report([tmp_path / "run"]).read_text(encoding="utf-8"))
    (tmp_path / "run" / VERIFICATION).write_text('{"verdict": "equal"}')
    with pytest.raises(DataError, match="does not hold a verification"):
        list(proof_sections(tmp_path / "run"))


def test_verify_keeps_what_it_found_where_it_is_told_to(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef one(x):\n    return x.sum()\n\ndef many(xs):\n    return [x.sum() for x in xs]\n\n"
        "samples = [torch.arange(1.0, 2.0 + n) for n in range(5)]\n"
    )
    target = f"{tmp_path / 'mine.py'}:"
    command = ["verify", f"{target}many", "--one", f"{target}one", "--samples", f"{target}samples"]
    code = truebatch([*command, "--out", str(tmp_path / "kept")])
    capsys.readouterr()
    kept = json.loads((tmp_path / "kept" / VERIFICATION).read_text())
    assert kept["ok"] == (code == 0)
    assert kept["target"] == f"{target}many"
    assert "Verification" in terminal(tmp_path / "kept")


def test_a_fit_has_its_points_and_the_batch_sizes(tmp_path):
    (tmp_path / "fit.json").write_text(json.dumps(FIT))
    told = terminal(tmp_path)
    for words in ("GiB measured", "9.0 to 10.0", "does not fit", "123,456"):
        assert words in told
    text = write_report([tmp_path]).read_text(encoding="utf-8")
    harmless(text)
    assert text.count("<svg") == 3
    (tmp_path / "fit.json").write_text(json.dumps({**FIT, "sizes": 3}))
    with pytest.raises(DataError, match="does not hold batch sizes"):
        write_report([tmp_path])


def test_the_lengths_of_a_run_are_kept_when_it_begins_and_shown_with_what_groupings_waste(tmp_path):
    lengths = np.random.default_rng(0).integers(5, 200, MOST_LENGTHS + 500)
    (tmp_path / "plan").mkdir()
    check_data(RunFolder(tmp_path, {}), Measured(lengths=lengths))
    kept = np.load(tmp_path / "plan" / LENGTHS)
    assert len(kept) == MOST_LENGTHS
    assert (kept[0], kept[-1]) == (lengths[0], lengths[-1])
    (tmp_path / "config.yaml").write_text("train:\n  samples_per_step: 64\n  batch_size: 16\n")
    told = terminal(tmp_path)
    for words in ("95 %", "Padding by grouping", "steps of 64 samples", "bucketed", "packed"):
        assert words in told
    assert write_report([tmp_path]).read_text(encoding="utf-8").count("<svg") == 2
    (tmp_path / "plan" / LENGTHS).write_bytes(b"torn")
    with pytest.raises(DataError, match="is damaged"):
        write_report([tmp_path])


def test_the_terminal_has_every_table_of_the_page_and_needs_no_pictures(tmp_path, monkeypatch):
    keep_verification(tmp_path, FOUND)
    (tmp_path / "fit.json").write_text(json.dumps(FIT))
    (tmp_path / "status.json").write_text(json.dumps({"state": "done", "step": 3, "message": "\x1b[31mred"}))
    monkeypatch.setattr(plots, "load_matplotlib", lambda: pytest.fail("nothing is drawn for a terminal"))
    told = terminal(tmp_path)
    assert "\x1b" not in told
    for section in report_sections([tmp_path]):
        for table in section.tables:
            assert all(cell in told for cell in table.header)
    assert truebatch(["report", str(tmp_path), "--text"]) == 0
