"""A report is one file that shows what a run holds, runs nothing and asks nobody."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.reports.hostile import HOSTILE
from truebatch.cli.app import run as truebatch
from truebatch.errors import ConfigError, DataError, RunError
from truebatch.reports.artifacts import keep_picture, keep_table, kept_findings
from truebatch.reports.page import MOST_BYTES, Section, render_page
from truebatch.reports.plots import bars
from truebatch.reports.report import write_report
from truebatch.reports.sections.run import read_log
from truebatch.reports.tables import Table


class Tags(HTMLParser):
    """Every tag with its attributes, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def harmless(text: str) -> None:
    """No tag that runs or loads anything, no handler, no address but inside the page and in data."""
    for tag, attributes in Tags(text).found:
        assert tag not in {"script", "iframe", "object", "embed", "base", "form", "link", "audio", "video"}, tag
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/")), attributes
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder as training leaves it."""
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: x\ntrain:\n  learning_rate: 0.001\n")
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": 30, "exit_code": 0, "message": "all"}))
    records = [
        {"step": i, "loss": 3.0 / i, "loss/nll": 3.0 / i, "tokens_per_second": 5.0 + i, "fill": 0.9 + i / 1000}
        for i in range(1, 31)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_everything_a_run_holds_is_in_its_report(run):
    keep_table(run, "10-padding", Table(("grouping", "waste"), (("packed", "0.1 %"),), "Padding by grouping"))
    keep_picture(run, "20-collapse", bars({"a": 1.0}, title="units", y="n"))
    (run / "evaluation").mkdir()
    (run / "evaluation" / "figures.json").write_text(json.dumps({"auroc": 0.8123, "cut": {"24h": 0.7}}))
    point = {"cells": 10, "pairs": 100, "samples": 1, "num_bytes": 2**20}
    prices = {"floor": 0.0, "fixed": 0.0, "per_cell": 1.0, "per_pair": 0.0, "per_sample": 0.0}
    fit = {"points": [point], "uncertainty": 0.01, **prices, "resident_bytes": 1, "optimiser_bytes": 1, "facts": {}}
    (run / "fit.json").write_text(json.dumps(fit))
    text = write_report([run]).read_text()
    for words in (
        "Padding by grouping",
        "0.1 %",
        "collapse",
        "auroc",
        "0.8123",
        "cut.24h",
        "Memory fit",
        "train.learning_rate",
    ):
        assert words in text
    assert text.count("<svg") == 4
    harmless(text)


def test_several_runs_have_their_curves_on_top_of_each_other(run, tmp_path):
    other = tmp_path / "b"
    other.mkdir()
    (other / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    text = write_report([run, other], tmp_path / "deep" / "both.html").read_text()
    first = text[text.index("<svg") : text.index("</svg>")]
    assert "a run" in first
    assert ">b<" in first
    harmless(text)


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_stay_words_wherever_they_come_from(words):
    picture = f"<svg xmlns='http://www.w3.org/2000/svg' onload='x'><script>alert(1)</script>{words}</svg>"
    section = Section(
        title=words,
        words=[words],
        tables=[Table((words, "b"), ((words, words),), words)],
        found=[picture],
        images=[("image/png", b"\x89PNG", words)],
    )
    harmless(render_page(words, [section, section, section, section]))


def test_a_report_that_would_be_too_large_leaves_pictures_out_and_says_so():
    small, large = Section(title="small", found=["<svg/>"]), Section(title="large", found=["x" * 2_000_000])
    text = render_page("t", [small, large])
    assert len(text.encode()) <= MOST_BYTES
    assert "1 picture(s) omitted" in text
    assert text.count("<img") == 1


def test_a_torn_last_line_is_no_record_and_a_damaged_one_is_named(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 31, "lo')
    assert len(read_log(run).records) == 30
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_log(run)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(RunError, match="is not a run"):
        write_report([tmp_path])
    assert truebatch(["report", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_findings_keep_their_order_and_refuse_odd_names(run):
    keep_table(run, "20-b", Table(("a",), (("1",),)))
    keep_table(run, "10-a", Table(("a",), (("2",),)))
    assert [name for name, _ in kept_findings(run)] == ["10-a", "20-b"]
    with pytest.raises(ConfigError, match="short name"):
        keep_table(run, "../x", Table(("a",), ()))
    (run / "findings" / "30-c.json").write_text('{"header": ["a"], "rows": [["1", "2"]]}')
    with pytest.raises(DataError, match="does not hold a table"):
        list(kept_findings(run))


def test_a_kept_picture_is_well_formed_whatever_is_written_in_it(run):
    words = "".join(chr(n) for n in (0, 8, 9, 10, 27, 0xFFFE, 0xD800)) + "真批次"
    path = keep_picture(run, "20-x", f"<svg xmlns='http://www.w3.org/2000/svg'><text>{words}</text></svg>")
    assert "真批次" in (ElementTree.parse(path).getroot()[0].text or "")
