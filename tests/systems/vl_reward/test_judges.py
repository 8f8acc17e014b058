"""Judges in processes of their own: any number of them gives the same scores, and none of their deaths costs a sample."""

from __future__ import annotations

import base64
import json
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.hf.processors import load_processor
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.backends.load import open_backend
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.readouts import Generate
from truebatch.scoring.readouts.scale import Scale
from truebatch_systems.vl_reward.config import (
    BenchmarkSettings,
    EditorParams,
    EditorSettings,
    JudgeParams,
    JudgeSettings,
    RewardConfig,
    RewardEvaluationSettings,
)
from truebatch_systems.vl_reward.data.prompts import build_messages
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS, edit_picture, make_records
from truebatch_systems.vl_reward.judge import judges
from truebatch_systems.vl_reward.judge.judges import check_judge, open_called, open_judge, open_judges
from truebatch_systems.vl_reward.judge.tiny_judge import tiny_judge
from truebatch_systems.vl_reward.pipeline import run_benchmark

FAKE = textwrap.dedent(
    """
    import json, os, signal, sys, time
    here, parts = os.environ["FAKE_HERE"], json.loads(os.environ["FAKE_PARTS"])
    def say(**value): sys.stdout.write(json.dumps(value) + "\\n"); sys.stdout.flush()
    def once(name):
        try: os.close(os.open(os.path.join(here, name), os.O_CREAT | os.O_EXCL)); return True
        except FileExistsError: return False
    def answer(name):
        text = parts.get(name, "").removeprefix("says ") if parts.get(name, "").startswith("says ") else None
        return {"score": None, "output": {"text": text or '{"score": %d}' % (int(name) % 11), "ended": "end"}, "tokens": 9}
    json.loads(sys.stdin.readline())
    say(ready=1)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "describe":
            say(describe={"backend": "fake", "model": "fake"}); continue
        names = [sample["id"] for sample in request["samples"]]
        if request["do"] == "fit":
            say(cells=20, number=request["number"]); continue
        if request["do"] == "cost":
            say(costs=[{"tokens": 9, "new_tokens": 1, "patches": 0} for _ in names]); continue
        asked = {parts.get(name) for name in names}
        if "dies" in asked or ("is killed once" in asked and once("killed")): os.kill(os.getpid(), signal.SIGKILL)
        if "exits" in asked: sys.stderr.write("no more memory on the device"); sys.stderr.flush(); os._exit(1)
        if "hangs" in asked: time.sleep(60)
        if "is out of memory once" in asked and len(names) > 1 and once("memory"):
            say(error="OutOfMemoryError: CUDA out of memory", memory=True); continue
        if "prints" in asked: sys.stdout.write("x" * (1 << 20) + "\\n"); sys.stdout.flush()
        answers = [answer(name) for name in names]
        if "says too little" in asked: answers.pop()
        if "says too much" in asked: answers.append(answers[0])
        say(answers=answers, number=request["number"])
    """
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A judge of the standard library alone that plays the parts it is given, by sample id."""
    (tmp_path / "here").mkdir()
    (tmp_path / "fakejudge.py").write_text(FAKE)
    monkeypatch.setattr(judges, "MODULE", "fakejudge")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_HERE", str(tmp_path / "here"))

    def play(**parts):
        monkeypatch.setenv("FAKE_PARTS", json.dumps({name.removeprefix("p"): part for name, part in parts.items()}))

    return play


def config_of(folder, records, *, devices=(0, 1), batch_size=4, timeout=600.0):
    """A benchmark whose edits are ready pictures, and so many judges in processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "b.json").write_text(json.dumps(records))
    ready = folder / "ready"
    for record in make_records(len(records)):
        path = ready / record["subset"] / Path(record["original_image_path"]).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(record["src_img_b64"]))
    params = JudgeParams(device="cpu", device_ids=devices, batch_size=batch_size, timeout=timeout)
    return RewardConfig(
        benchmark=BenchmarkSettings(data_path=folder / "b.json"),
        diffusion_model=EditorSettings(type="folder", params=EditorParams(folder=ready)),
        reward_model=JudgeSettings(type="tiny", params=params),
        prompts=PROMPTS,
        evaluation=RewardEvaluationSettings(output_dir=folder / "run", max_failure_rate=1.0),
    )


def report_of(config, say=lambda line: None):
    before = psutil.Process().children()
    done = run_benchmark(config, say=say)
    assert set(psutil.Process().children()) <= set(before)  # no judge is left behind
    return done, {one["id"]: one for one in done.summary["samples"]}


def test_a_judge_that_prints_dies_exits_hangs_or_answers_for_too_few_or_too_many_costs_only_that_sample(fake, tmp_path):
    fake(p0001="dies", p0002="exits", p0004="prints", p0005="says too little", p0006="says too much", p0007="hangs")
    _, rows = report_of(config_of(tmp_path / "b", make_records(12), batch_size=2, timeout=4.0))
    bad = {name: (row["status"], row["kind"]) for name, row in rows.items() if row["status"] != "ok"}
    assert bad == {
        "0001": ("judge_failed", "crashed"), "0002": ("judge_failed", "crashed"), "0005": ("judge_failed", "raised"),
        "0006": ("judge_failed", "raised"), "0007": ("judge_failed", "hung"),
    }  # fmt: skip
    assert {name: row["score"] for name, row in rows.items() if name not in bad} == {
        name: float(int(name) % 11) for name in rows if name not in bad
    }
    assert "no more memory on the device" in rows["0002"]["message"]


def test_broken_pictures_unreadable_answers_a_killed_worker_and_no_memory_at_once_are_counted_to_the_last_sample(
    fake, tmp_path
):
    records = make_records(40)
    for index in (3, 21):  # 5 % broken: cut off behind the header
        raw = base64.b64decode(records[index]["src_img_b64"])
        records[index]["src_img_b64"] = base64.b64encode(raw[: len(raw) // 2]).decode()
    bad = {"p0010": "says hard to say", "p0030": "says 7 or 8"}  # 5 % unreadable
    fake(**bad)
    config = config_of(tmp_path / "b", records, devices=(0,))
    calm, _ = report_of(config)
    markdown = (config.evaluation.output_dir / "report.md").read_bytes()
    shutil.rmtree(config.evaluation.output_dir / "scores")
    fake(**bad, p0012="is killed once", p0005="is out of memory once")
    said = []
    disturbed, rows = report_of(config_of(tmp_path / "b", records), said.append)
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"killed", "memory"}
    assert sum("Falling back to sequential processing" in line for line in said) >= 2
    assert disturbed.summary["overall"]["statuses"] == {"edit_failed": 2, "ok": 36, "ambiguous": 1, "no_number": 1}
    assert (disturbed.summary["failure_rate"], disturbed.exit_code) == (4 / 40, 3)
    assert {name for name, row in rows.items() if row["status"] == "edit_failed"} == {"0003", "0021"}
    assert {name for name, row in rows.items() if row["status"] == "no_number"} == {"0010"}
    assert {name for name, row in rows.items() if row["status"] == "ambiguous"} == {"0030"}
    assert disturbed.summary == calm.summary
    assert (config.evaluation.output_dir / "report.md").read_bytes() == markdown


def test_a_budget_that_is_not_given_is_measured_where_the_judge_is_and_kept(fake, tmp_path):
    fake()
    config = config_of(tmp_path / "b", make_records(6))
    open_ended = replace(config.reward_model.params, cells=None)
    config = replace(config, reward_model=replace(config.reward_model, params=open_ended))
    report_of(config)
    run = config.evaluation.output_dir
    assert json.loads((run / "scores" / "budget.json").read_text()) == {"cells": 20}
    plan = json.loads((run / "scores" / "plan.json").read_text())
    assert {len(batch) for batch in plan["batches"]} == {1, 2}  # 10 cells a sample, three samples a category


def test_what_could_not_be_opened_after_editing_is_refused_before_it(tmp_path):
    for judge, words in (
        (JudgeSettings(type="transformers", params=JudgeParams(model_name="nowhere")), "holds no model"),
        (JudgeSettings(type="tiny", params=JudgeParams(device="cuda:99")), "does not exist"),
        (JudgeSettings(type="tiny", params=JudgeParams(device_ids=[99])), "fewer GPUs than processes"),
        (JudgeSettings(params=JudgeParams(python_path="no-such-python")), "no such Python"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_judge(judge)
    config = config_of(tmp_path, make_records(2))
    wrong = JudgeSettings(type="transformers", params=JudgeParams(model_name="nowhere"))
    with pytest.raises(ConfigError, match="holds no model"):
        run_benchmark(replace(config, reward_model=wrong), say=lambda line: None)
    assert not (config.evaluation.output_dir / "edits").exists()


@pytest.mark.xdist_group("vl_reward_model")
@pytest.mark.parametrize("metric", ["number", "yes_no"])
def test_expected_scores_of_a_tiny_judge_are_the_same_alone_and_together(metric):
    judge = open_judge(JudgeSettings(type="tiny", params=JudgeParams(readout="expected", device="cpu")), metric)
    pictures = [draw(record) for record in make_records(6)]
    asked = [
        ScoreRequest(id=str(at), messages=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?" * at}]}],  # noqa: E501
              images=[picture])
        for at, picture in enumerate(pictures)
    ]  # fmt: skip
    prepared = [judge.prepare(one) for one in asked]
    together = [one.score for one in judge.judge(prepared)]
    alone = [judge.judge([one])[0].score for one in prepared]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in alone}) > 3  # it looks at what it is shown
    assert all(0 <= score <= (10 if metric == "number" else 1) for score in alone)


def draw(record):
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(record["src_img_b64"]))).convert("RGB")
    return edit_picture(image, record["edit_instruction_en"])


def test_a_tiny_judge_is_the_same_every_time_it_is_made():
    first, second = tiny_judge()[0], tiny_judge()[0]
    assert all(bool((a == b).all()) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    call = {"type": "scripted", "params": {"device_ids": [0, 1]}, "metric": "number"}
    assert open_called(call).describe() == open_judges(JudgeSettings(), "number")[0].describe()


@pytest.mark.slow
@pytest.mark.parametrize("readout", ["text", "expected"])
def test_judges_in_two_real_processes_give_the_answers_of_one_in_this(tmp_path, readout):
    summaries = []
    for name, devices in (("one", ()), ("two", (0, 1))):
        config = config_of(tmp_path / name, make_records(12), devices=devices)
        params = replace(config.reward_model.params, readout=readout, max_new_tokens=12)
        config = replace(config, reward_model=replace(config.reward_model, params=params))
        summaries.append({**run_benchmark(config, say=lambda line: None).summary, "editor": ""})  # it names its folder
    assert summaries[0] == summaries[1]
    assert len({(one["score"], one["answer"]) for one in summaries[0]["samples"]}) > 3


def test_a_saved_vision_language_model_is_loaded_for_images_without_torchvision(tmp_path):
    """Its processor also takes videos, for which transformers asks for torchvision; no sample here has one."""
    model, processor = tiny_judge()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_processor(tmp_path)
    assert type(loaded).__name__ == "Qwen3VLProcessor"
    image = Image.new("RGB", (64, 96), "red")
    text = ["<|vision_start|><|image_pad|><|vision_end|>how red?"]
    expected, found = (one(text=text, images=[image], return_tensors="pt") for one in (processor, loaded))
    assert set(expected) == set(found)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    readout = Generate(Generation(temperature=0.0, max_new_tokens=20), scale=Scale(), structured="json")
    judges = [
        model_backend(model, processor, readout, Limits()),
        open_backend(tmp_path, readout, Limits(), device="cpu"),
    ]
    asked = ScoreRequest(id="0", messages=build_messages("s", "how red?", ("",)), images=[image])
    answers = [judge.judge([judge.prepare(asked)])[0] for judge in judges]
    assert answers[0].score == answers[1].score
    assert 0 <= answers[0].score <= 10
