"""The benchmark of the Chinese GPT measures the same samples in every way, and says what it leaves out."""

import json
from dataclasses import replace

import pytest

from benchmarks.systems import chinese_gpt
from tests.systems.chinese_gpt.small import STATEMENTS, TEXTS
from truebatch.errors import ConfigError
from truebatch.training.context import TrainResult
from truebatch.training.train_state import EndReason


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "small.json"
    file.write_text(json.dumps(TEXTS, ensure_ascii=False), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def result(tmp_path_factory, corpus):
    out = tmp_path_factory.mktemp("bench") / "result.json"
    config = replace(chinese_gpt.make_config(quick=True, data=corpus), sizes=(1, 4), samples=4, seconds=1e9)
    chinese_gpt.run_gpt_bench(config, out=out, say=lambda _line: None)
    return json.loads(out.read_text(encoding="utf-8"))


def test_every_way_is_counted_in_both_definitions_over_the_same_tokens(result):
    for corpus in ("statements", "dialogues"):
        for counted in (chinese_gpt.ONE_UPDATE, chinese_gpt.EQUAL_STEPS):
            rows = [row for row in result["rows"] if (row["corpus"], row["counted"]) == (corpus, counted)]
            tokens = {round(row["tokens_per_second"] / row["samples_per_second"] * 4) for row in rows}
            assert len(tokens) == 1
            assert {row["way"] for row in rows} >= {"one by one", "padded", "packed"}
            assert next(row for row in rows if row["way"] == "one by one")["speedup"] == 1.0
            assert all(row["fill"] == 1.0 for row in rows if row["way"] == "packed")


def test_padding_falls_from_fixed_to_packed(result):
    for row in result["padding"]:
        assert row["fixed"] > row["dynamic"] > row["bucketed"] > row["packed"] == 0.0


def test_the_result_says_how_to_make_it_again(result):
    assert result["command"].startswith("python -m benchmarks.systems.chinese_gpt")
    assert {"date", "hardware", "threads", "torch"} <= set(result)
    assert set(result["choice"]) == {"statements", "dialogues"}


def test_what_there_was_no_time_for_is_named(corpus):
    config = replace(chinese_gpt.make_config(quick=True, data=corpus), sizes=(1,), samples=2, seconds=0.0)
    found = chinese_gpt.run_gpt_bench(config, out=None, say=lambda _line: None)
    assert found["rows"] == []
    assert found["left_out"]


def test_quality_alone_trains_both_stages_and_counts_cpu_seconds(corpus):
    config = chinese_gpt.make_config(data=corpus, only="quality", max_steps=1, seed=3)
    found = chinese_gpt.run_gpt_bench(config, out=None, say=lambda _line: None)
    assert found["rows"] == found["padding"] == []
    assert list(found["quality"]) == ["pretrained", "tuned"]
    assert 0 < found["quality"]["pretrained"]["cpu_seconds"] < found["quality"]["tuned"]["cpu_seconds"]
    assert found["quality"]["tuned"]["answers_asked"] > 0


def test_a_stage_that_was_interrupted_has_no_figures(corpus, monkeypatch):
    ended = TrainResult(step=1, records=(), best_loss=None, why="interrupted", end=EndReason.INTERRUPTED)
    monkeypatch.setattr(chinese_gpt, "train_system", lambda *_all: ended)
    said = []
    found = chinese_gpt.run_gpt_bench(chinese_gpt.make_config(data=corpus, only="quality"), out=None, say=said.append)
    assert found["quality"] == {}
    assert said == ["pretrained: interrupted, so there are no figures of it"]


def test_a_corpus_without_dialogues_has_one_stage(tmp_path):
    file = tmp_path / "told.json"
    file.write_text(json.dumps(STATEMENTS, ensure_ascii=False), encoding="utf-8")
    config = replace(chinese_gpt.make_config(data=str(file), quality=True, max_steps=1), seconds=0.0)
    found = chinese_gpt.run_gpt_bench(config, out=None, say=lambda _line: None)
    assert {row["corpus"] for row in found["padding"]} == {"statements"}
    assert list(found["quality"]) == ["pretrained"]


def test_an_unknown_part_is_refused():
    with pytest.raises(ConfigError, match="no such part"):
        chinese_gpt.make_config(only="speed")
