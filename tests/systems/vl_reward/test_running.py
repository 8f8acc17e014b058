"""The whole benchmark as a user runs it: from settings to reports, twice, wrongly, and with the note's own names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.scoring.judges import qwen3_vl
from truebatch.cli import run
from truebatch.errors import BatchError, ConfigError
from truebatch.generation.settings import Generation
from truebatch.scoring.batching import Limits
from truebatch.scoring.inprocess import model_backend
from truebatch.scoring.readouts import Generate
from truebatch.systems.vl_reward.compat import Qwen3VLRewardModel
from truebatch.systems.vl_reward.settings import (
    BenchmarkSettings,
    EditorParams,
    EditorSettings,
    EvaluationSettings,
    RewardConfig,
)
from truebatch.systems.vl_reward.shapes import ShapesJudge

ROOT = Path(__file__).parents[3]


def test_the_embedded_benchmark_runs_and_its_report_can_be_made_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["--set", "benchmark.samples=12", "--set", "evaluation.output_dir=run"]
    assert run(["score", "vl_reward", *command]) == 0
    out = capsys.readouterr().out
    assert "12 edited now" in out
    first = json.loads(Path("run/report.json").read_text())
    assert {one["score"] for one in first["samples"]} <= {5.0, 10.0}
    assert first["overall"]["valid"] == 12
    markdown = Path("run/report.md").read_bytes()
    for name in ("report.json", "report.md", "gallery.html"):
        Path("run", name).unlink()
    assert run(["vl_reward", "gallery", *command]) == 0
    again = json.loads(Path("run/report.json").read_text())
    assert {**again, "speed": 0} == {**first, "speed": 0}
    assert Path("run/report.md").read_bytes() == markdown
    assert "Paint the" in Path("run/gallery.html").read_text()
    assert run(["vl_reward", "run", *command]) == 0
    assert "0 edited now" in capsys.readouterr().out
    assert run(["vl_reward", "compare", "run", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["unchanged"], found["difference"]) == (12, 12, 0.0)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("reward_model.params.batch_size=0", "batch_size"),
        ("reward_model.params.use_batch_inferense=true", "use_batch_inference"),
        ("diffusion_model.type=folder", "folder"),
        ("reward_model.type=transformers", "model_name"),
        ("evaluation.max_failure_rate=2", "max_failure_rate"),
        ("benchmark.data_path=x.json", "shapes only"),
    ],
)
def test_wrong_settings_are_refused_by_name(setting, words, capsys):
    assert run(["vl_reward", "run", "--set", setting]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "code"), [(1.0, 3), (0.0, 1)])
def test_failures_decide_the_exit_code_by_the_rate_that_is_allowed(tmp_path, rate, code, capsys):
    (tmp_path / "ready").mkdir()
    settings = [
        f"evaluation.output_dir={tmp_path / 'run'}",
        f"evaluation.max_failure_rate={rate}",
        "benchmark.samples=4",
    ]
    settings += ["diffusion_model.type=folder", f"diffusion_model.params.folder={tmp_path / 'ready'}"]
    assert run(["vl_reward", "run", *(part for one in settings for part in ("--set", one))]) == code
    assert "edit_failed 4" in capsys.readouterr().out


def test_validate_names_faults_without_loading_a_model(tmp_path, capsys):
    (tmp_path / "b.json").write_text(json.dumps([{"subset": "物理", "edit_instruction_en": "x", "src_img_b64": "###"}]))
    (tmp_path / "pictures").mkdir()
    config = tmp_path / "c.yaml"
    config.write_text(
        f"benchmark: {{data_path: {tmp_path / 'b.json'}}}\n"
        f"diffusion_model: {{type: folder, params: {{folder: {tmp_path / 'pictures'}}}}}\n"
        "reward_model: {type: transformers, params: {model_name: nowhere}}\n"
    )
    assert run(["vl_reward", "validate", "--config", str(config)]) == 1
    assert "record 0: `src_img_b64` is not base64" in capsys.readouterr().out


def test_the_starting_files_run_as_the_note_says(tmp_path):
    assert run(["init", "vl_reward", "--out", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "config_multi_gpu.yaml", "main.py"]
    command = [sys.executable, "main.py", "--config", "config.yaml", "--set", "benchmark.samples=6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "| all | 6 | 6 |" in done.stdout
    assert (tmp_path / "outputs" / "gallery.html").is_file()


def test_the_settings_for_several_gpus_are_understood(tmp_path):
    assert run(["init", "vl_reward", "--out", str(tmp_path)]) == 0
    from truebatch.config import load_config

    config = load_config(RewardConfig, tmp_path / "config_multi_gpu.yaml")
    assert list(config.diffusion_model.params.device_ids) == [0, 1, 2, 3, 4, 5]
    assert config.reward_model.params.batch_size == 8


@pytest.mark.xdist_group("vl_reward_model")
def test_the_notes_own_names_judge_in_batches_as_one_by_one_with_a_vision_language_model():
    model, processor = qwen3_vl()
    readout = Generate(Generation(temperature=0.0, max_new_tokens=6))
    judge = Qwen3VLRewardModel(
        backend=model_backend(model, processor, readout, Limits(), name="tiny"), say=lambda _: None
    )
    images = [Image.new("RGB", size, colour) for size, colour in
              (((64, 64), "red"), ((96, 64), "blue"), ((64, 128), "green"), ((80, 80), "white"))]  # fmt: skip
    users = ["short", "a rather longer question about the picture", "x", "medium length"]
    texts = []
    for size, batched in ((4, True), (2, True), (4, False)):
        judge.batch_score(images, ["judge"] * 4, users, batch_size=size, use_batch_inference=batched)
        texts.append({at: one.output["text"] for at, one in judge.failures.items()})
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 4  # random weights never say a score, and nothing invents one


def test_an_answer_that_cannot_be_read_is_none_and_lists_of_unequal_length_are_refused():
    judge = Qwen3VLRewardModel(backend=ShapesJudge({"1": "no idea"}), say=lambda _: None)
    image = Image.new("RGB", (8, 8), "white")
    image.putpixel((2, 4), (200, 40, 40))
    question = "It was asked: Paint the square red. Answer as"
    scores = judge.batch_score([image, image], ["s", "s"], [question, question], batch_size=2)
    assert scores == [10.0, None]
    assert judge.failures[1].kind == "parse_error"
    assert judge.score(image, "s", question) == 10.0
    with pytest.raises(BatchError, match="every picture"):
        judge.batch_score([image], ["s", "s"], [question])
    with pytest.raises(ConfigError, match="folder or a backend"):
        Qwen3VLRewardModel()


def test_settings_are_plain_values():
    config = RewardConfig(
        benchmark=BenchmarkSettings(samples=3),
        diffusion_model=EditorSettings(type="folder", params=EditorParams(folder=Path("x"))),
        evaluation=EvaluationSettings(metric="yes_no"),
    )
    assert config.benchmark.wanted().language == "en"
