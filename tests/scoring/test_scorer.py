"""The front door and the commands: scores in order, failures by name, exit codes that say what happened."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch

import truebatch
from tests.scoring.backends.test_transformers import Broken
from tests.scoring.judges import VISION, make_tokenizer, picture_questions, questions, text_judge
from truebatch.cli.app import run
from truebatch.errors import ConfigError, DataError, LawError
from truebatch.generation.config import Generation
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.readouts import Generate, Labels, YesNo
from truebatch.scoring.runner import RunConfig
from truebatch.scoring.scorer import Scorer
from truebatch.scoring.spec import ScoreCall, open_one
from truebatch.testing.failpoints import armed

TEN = Labels({str(n): n for n in range(1, 11)})
pytestmark = pytest.mark.xdist_group("scoring-models")


@pytest.fixture(scope="module")
def text():
    return text_judge()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("model")
    text[0].save_pretrained(path)
    text[1].save_pretrained(path)
    return path


def write(path, samples):
    path.write_text("".join(json.dumps(one) + "\n" for one in samples), encoding="utf-8")
    return path


def test_scores_errors_rows_and_stats_in_the_order_of_the_samples(text, tmp_path):
    scorer = Scorer(text[0], TEN, processor=text[1], limits=Limits(cells=600))
    data = [*questions(12), {"user": "x" * 5000, "id": "long"}, 7]
    done = scorer.score(data, tmp_path / "run")
    assert done.report.ok
    assert done.scores.shape == (14,)
    assert np.isfinite(done.scores[:12]).all()
    assert np.isnan(done.scores[12:]).all()
    assert [(one.index, one.id, one.kind) for one in done.errors] == [
        (12, "long", "too_long"),
        (13, "13", "wrong_type"),
    ]
    assert done.stats["judged"] == 12
    assert [row["id"] for row in done.rows()][:12] == [one["id"] for one in data[:12]]
    alone = Scorer(text[0], TEN, processor=text[1], limits=Limits(rows=1), reuse=False).score(data, tmp_path / "alone")
    assert done.scores[:12] == pytest.approx(alone.scores[:12], abs=2e-5)
    assert [outcome.score for outcome in scorer.judge(data[:3])] == pytest.approx(list(done.scores[:3]), abs=2e-5)


def test_a_run_with_images_killed_by_a_signal_goes_on_to_the_same_bytes(tmp_path):
    model, processor = VISION["qwen3_vl"]()
    readout = Generate(Generation(max_new_tokens=4, temperature=0.8, seed=1))
    scorer = Scorer(model, readout, processor=processor, limits=Limits(cells=700))
    data = picture_questions(10)
    scorer.score(data, tmp_path / "whole", check=False).export(tmp_path / "whole.jsonl")

    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.done:
            raise Stopped

    with pytest.raises(Stopped):
        scorer.score(data, tmp_path / "parts", check=False, how=RunConfig(on_progress=stop))
    again = scorer.score(data, tmp_path / "parts", check=False)
    assert 0 < again.stats["judged"] < 10
    again.export(tmp_path / "parts.jsonl")
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "parts.jsonl").read_bytes()


def test_a_model_that_batches_wrongly_is_refused_before_the_run(tmp_path, text):
    model = Broken(text[0].config)
    model.load_state_dict(text[0].state_dict())
    model.fault = "right"
    with pytest.raises(LawError, match="gives other results in a batch"):
        Scorer(model, TEN, processor=make_tokenizer(), reuse=False).score(questions(9), tmp_path)
    assert not (tmp_path / "journal").exists()


def test_any_function_can_judge_and_what_it_cannot_is_a_record(tmp_path):
    def length(samples):
        return [None if one.user == "none" else len(one.user) for one in samples]

    done = Scorer(length).score(["a", "bb", "none", "dddd"], tmp_path)
    assert done.scores.tolist()[:2] == [1.0, 2.0]
    assert math.isnan(done.scores[2])
    assert done.errors[0].kind == "no_score"


def test_a_reward_function_has_the_form_trl_calls_and_never_invents_a_reward(text):
    scorer = Scorer(text[0], TEN, processor=text[1])
    reward = scorer.as_reward_function()
    chat = [{"role": "user", "content": "hello"}]
    found = reward(
        prompts=[chat, "plain", chat], completions=[[{"role": "assistant", "content": "hi"}], "yes", "z" * 5000],
        completion_ids=[[1], [2], [3]], answer=["a", "b", "c"], trainer_state=None,
    )  # fmt: skip
    assert isinstance(found[0], float)
    assert isinstance(found[1], float)
    assert found[2] is None
    asked = []

    def ask(prompt, completion, columns):
        asked.append((prompt, completion, columns))
        return {"user": f"{prompt} {completion} {columns['answer']}"}

    scorer.as_reward_function(ask, name="judge")(["p"], ["c"], answer=["a"], step=3)
    assert asked == [("p", "c", {"answer": "a"})]


def test_what_cannot_judge_and_empty_data_are_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="needs a readout"):
        Scorer(text[0], processor=text[1])
    with pytest.raises(ConfigError, match="cannot judge"):
        Scorer(5)
    with pytest.raises(DataError, match="no samples"):
        Scorer(text[0], YesNo(), processor=text[1]).score([], tmp_path)
    assert truebatch.Scorer is Scorer


def test_the_command_scores_tells_exports_and_goes_on(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "q.jsonl", questions(6))
    command = ["score", str(data), "--model", str(folder), "--labels", "1,2,3", "--export", "s.csv"]
    assert run(command) == 0
    with (tmp_path / "s.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"q{n}" for n in range(6)]
    assert all(1 <= float(row["score"]) <= 3 for row in rows)
    said = capsys.readouterr()
    assert "6 samples, 6 done, 0 failed" in said.out
    assert "equal: 6 samples alone and together" in said.err
    assert run([*command, "--dtype", "bfloat16"]) == 2
    assert "dtype: was 'float32', now 'bfloat16'" in capsys.readouterr().err
    data.write_text(data.read_text() + "{broken\n")
    assert run(command) == 3
    assert run(["run", "status", "runs/score-q", "--json"]) == 3
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kinds"] == {"read/invalid_json": 1}
    same = ["--data", str(data), "--model", str(folder)]
    assert run(["run", "retry", "runs/score-q", "--kind", "read/invalid_json", *same]) == 3
    assert run(["run", "export", "runs/score-q", "--to", "s.jsonl"]) == 0
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 7
    assert run([*command, "--fresh", "--dtype", "bfloat16", "--level", "shape"]) == 3
    assert (tmp_path / "runs" / "score-q.1").is_dir()


def test_one_by_one_and_compared_give_what_batches_give(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "q.jsonl", questions(12))
    scores = []
    for way in ("on", "off", "compare"):
        command = ["score", str(data), "--model", str(folder), "--labels", "1,2,3", "--out", way, "--true-batch", way]
        assert run([*command, "--export", f"{way}.jsonl"]) == 0
        scores.append([json.loads(line)["score"] for line in (tmp_path / f"{way}.jsonl").read_text().splitlines()])
        capsys_text = capsys.readouterr().err
        assert ("12 samples alone and together" in capsys_text) == (way == "compare")
        assert ("check" in capsys_text) == (way != "off")
    assert scores[0] == pytest.approx(scores[1], abs=2e-5)
    assert scores[0] == scores[2]


def test_the_command_generates_with_any_level(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "q.jsonl", questions(5))
    found = []
    for level in ("close", "shape"):
        command = ["score", str(data), "--model", str(folder), "--generate", "--max-new-tokens", "5"]
        assert run([*command, "--level", level, "--out", level, "--export", f"{level}.jsonl"]) == 0
        found.append(
            [json.loads(line)["output"]["text"] for line in (tmp_path / f"{level}.jsonl").read_text().splitlines()]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "choose one way to read the model"),
        (["--yesno", "--generate"], "--yesno, --generate"),
        (["--labels", "good,bad"], "has no value"),
        (["--yesno", "--shard", "3"], "a shard is i/n"),
        (["--yesno", "--shard", "2/2"], "i from 0 to n-1"),
        (["--yesno", "--level", "exact"], "unknown level"),
        (["--yesno", "--dtype", "int8"], "unknown dtype"),
        (["--generate", "--parse", "json"], "unknown parser"),
        (["--yesno", "--true-batch", "maybe"], "on, off or compare"),
        (["--yesno", "--engine", "ray"], "ray with workers"),
        (["--generate", "--temperature", "-1"], "out of range"),
    ],
)
def test_wrong_options_are_said_before_anything_is_written(folder, tmp_path, capsys, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "q.jsonl", questions(2))
    assert run(["score", str(data), "--model", str(folder), *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_wrong_data_models_and_folders_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    assert run(["score", "empty.jsonl", "--model", "scripted", "--yesno"]) == 2
    assert run(["score", "none.jsonl", "--model", "scripted", "--yesno"]) == 2
    write(tmp_path / "q.jsonl", questions(2))
    assert run(["score", "q.jsonl", "--model", "nowhere", "--yesno"]) == 2
    assert run(["run", "status", "nowhere"]) == 2
    told = capsys.readouterr().err
    for part in (
        "holds no samples",
        "there is no file none.jsonl",
        "nowhere is not a model folder",
        "not a scoring run",
    ):
        assert part in told


def test_a_run_that_ended_half_way_is_told_exported_and_retried_from_another_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "q.jsonl", [*questions(20), {"id": "bad", "user": "b", "options": {"fail": "raise"}}])
    command = ["score", "q.jsonl", "--model", "scripted", "--yesno", "--cells", "120", "--no-check", "--window", "8"]
    with armed("journal.before_commit:enospc:3"):
        assert run([*command, "--out", "half"]) != 0
    assert run(["run", "status", "half", "--json"]) == 0
    half = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < half["ok"] < 20
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(["run", "retry", "../half", "--kind", "raised", "--data", "../q.jsonl", "--model", "scripted"]) == 3
    assert run(["run", "export", "../half", "--to", "s.jsonl"]) == 0
    states = [json.loads(line)["status"] for line in (tmp_path / "elsewhere" / "s.jsonl").read_text().splitlines()]
    assert states == ["ok"] * 20 + ["failed"]


def test_shards_of_one_run_folder_make_the_export_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "q.jsonl", questions(20))
    base = ["score", "q.jsonl", "--model", "scripted", "--yesno", "--cells", "120", "--no-check"]
    for shard in ("1/2", "0/2"):
        assert run([*base, "--out", "two", "--shard", shard, "--export", "two.jsonl"]) == 0
    assert run([*base, "--out", "one", "--export", "one.jsonl"]) == 0
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_no_random_number_of_others_is_drawn(text, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn = Generate(Generation(max_new_tokens=3, temperature=1.0))
    Scorer(text[0], drawn, processor=text[1]).score(questions(4), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("model", ["scripted", "http://127.0.0.1:9/v1"])
def test_compiling_what_is_no_model_here_is_refused(model):
    with pytest.raises(ConfigError, match="only a model is compiled"):
        open_one(ScoreCall(model=model, compiled=True))
