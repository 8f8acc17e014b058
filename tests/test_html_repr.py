"""What people hold in a notebook shows itself as a table in which every text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from tests.reports.hostile import HOSTILE
from truebatch.html_repr import html_lines, html_table, shown_text
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.reports.tables import Table, figures_table
from truebatch.scoring.scorer import Scorer
from truebatch.training.context import TrainResult
from truebatch.training.memory.batch_size_table import BatchSize, Sizing
from truebatch.training.memory.cost_model import Point, fit_points
from truebatch.verification.arrangements import Arrangement
from truebatch.verification.compare import Difference
from truebatch.verification.report import ArrangementResult, Cause, VerifyReport

ALLOWED = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.words = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        assert not attributes, (tag, attributes)
        self.found.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def plain(text: str) -> str:
    """The words of a table that holds nothing but cells."""
    tags = Tags(text)
    assert set(tags.found) <= ALLOWED
    return "\n".join(tags.words)


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_stay_words_in_a_notebook(words):
    told = plain(html_table([(words, words)], header=(words, words), title=words) + html_lines([words]))
    told.encode()
    assert told.split() == " ".join([shown_text(words)] * 6).split()
    plain(Table((words, "b"), ((words, words),), words)._repr_html_())
    plain(TrainResult(1, [{"step": 1, "loss": words}], None, words)._repr_html_())
    plain(report_with(words)._repr_html_())


def report_with(words: str) -> VerifyReport:
    arrangement = Arrangement(words, "right", ())
    result = ArrangementResult(arrangement, "different", (Difference("outputs", 1.0, 1e-5, where=words),), error=words)
    return VerifyReport([result], causes=[Cause(words, words, words)], notes=[words])


def test_a_report_of_verify_shows_every_arrangement_and_cause():
    told = plain(report_with("with a longer neighbour")._repr_html_())
    assert "BROKEN" in told
    assert "likely cause: with a longer neighbour" in told


def test_a_plan_a_fit_and_a_training_show_their_figures():
    assert "rank_imbalance" in plain(build_plan([3, 4, 5], PlanConfig(cells=9, samples_per_step=2))._repr_html_())
    fit = fit_points([Point(n, n * n, 1, 100 * n) for n in (1, 2, 4)], resident_bytes=1, optimiser_bytes=1, facts={})
    assert "bytes measured" in plain(fit._repr_html_())
    sizing = Sizing(
        fit=fit, layout="padded", limits={"here": 9}, cells={"here": 77}, longest=3, shortest=1,
        sizes=[BatchSize(4, 12.5, 11.0, 100, 200)],
    )  # fmt: skip
    told = plain(sizing._repr_html_())
    assert "12.5" in told
    assert "77" in told
    records = [{"step": step, "loss": 1 / step, "tokens": 5, "seconds": 0.1} for step in range(1, 40)]
    told = plain(TrainResult(39, records, None, "all steps are done")._repr_html_())
    assert told.split()[:6] == ["after", "step", "39:", "all", "steps", "are"]
    assert "0.02564" in told, "the last step is always there"


def test_a_scoring_run_shows_scores_and_failures(tmp_path):
    def judge(samples):
        return [float(len(sample.user)) for sample in samples]

    done = Scorer(judge).score(["<b>one", "three", {"nothing": 1}], tmp_path / "run", check=False)
    told = plain(done._repr_html_())
    assert "3 samples: 2 done, 1 failed, 0 pending" in told
    assert "6.0" in told
    assert "no_prompt" in told
    assert "failed" in plain(done.status._repr_html_())


def test_figures_are_rows_of_dotted_names():
    table = figures_table({"auroc": 0.81234, "cut": {"24h": [0.7, 0.9], "none": None}, "samples": 1234})
    assert table.rows == (("auroc", "0.8123"), ("cut.24h", "0.7 to 0.9"), ("samples", "1,234"))
