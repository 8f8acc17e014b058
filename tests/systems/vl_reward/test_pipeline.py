"""The whole benchmark as a user runs it: from settings to reports, twice, wrongly, and with the note's own names."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from PIL import Image

from tests.scoring.judges import qwen3_vl
from truebatch.cli.app import run
from truebatch.config.load import load_config
from truebatch.errors import BatchError, ConfigError
from truebatch.generation.config import Generation
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.readouts import Generate
from truebatch.scoring.readouts.scale import Scale
from truebatch_systems.vl_reward.compat import SYSTEM_PROMPT, USER_PROMPT, Qwen3VLRewardModel
from truebatch_systems.vl_reward.config import (
    BenchmarkSettings,
    EditorParams,
    EditorSettings,
    RewardConfig,
    RewardEvaluationSettings,
)
from truebatch_systems.vl_reward.data.toy_pictures import ShapesJudge, edit_picture, make_records
from truebatch_systems.vl_reward.judge.judges import check_judge
from truebatch_systems.vl_reward.pipeline import make_editors

ROOT = Path(__file__).parents[3]


def test_the_embedded_benchmark_runs_and_its_report_can_be_made_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["--set", "benchmark.samples=12", "--set", "evaluation.output_dir=run"]
    assert run(["score", "vl_reward", *command]) == 0
    out = capsys.readouterr().out
    assert "12 edited now" in out
    judge, rule = "[Qwen3VLRewardModel]", "=" * 60
    said = [re.sub(r"\d+\.\d{3}", "N", line) for line in out.splitlines()]
    begun = [at for at, line in enumerate(said) if line.startswith("[stage 2/2]")]
    for at, name in zip(begun, ("physical", "referential"), strict=True):
        assert said[at : at + 11] == [
            f"[stage 2/2] scoring images in batches - {name}", rule, f"{judge} 6 valid images to score...",
            f"{judge} Batch scoring 6 images with batch_size=4", f"{judge} Processed batch 0-3: avg_score=N",
            f"{judge} Processed batch 4-5: avg_score=N", "✅ scoring done, mean score: N", rule,
            f"[done] {name} - 6 samples processed", "mean score: N", rule,
        ]  # fmt: skip
    assert out.isascii() or not re.search("[一-鿿]", out), "no Chinese for readers of English"
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
    assert run(["report", "run"]) == 0
    page = Path("run/report.html").read_text()
    assert "Scores by category" in page
    assert page.count("<img") == 24, "every pair before and after"
    assert run(["vl_reward", "run", *command]) == 0
    assert "0 edited now" in capsys.readouterr().out
    assert run(["vl_reward", "compare", "run", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["unchanged"], found["difference"]) == (12, 12, 0.0)


def test_in_chinese_the_lines_are_those_of_the_original_log(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_LANG", "zh")
    assert run(["vl_reward", "run", "--set", "benchmark.samples=12", "--set", "evaluation.output_dir=run"]) == 0
    out = capsys.readouterr().out
    for line in ("[阶段1/2] 开始批量图像编辑 - physical, referential", "[阶段2/2] 开始批量图像评分 - physical",
                 "[Qwen3VLRewardModel] 准备评分 6 张有效图像...", "Processed batch 0-3: avg_score=",
                 "[完成] physical - 共处理 6 个样本", "✅ 评分完成，平均分: "):  # fmt: skip
        assert line in out
    assert "stage" not in out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("reward_model.params.batch_size=0", "batch_size"),
        ("reward_model.params.use_batch_inferense=true", "use_batch_inference"),
        ("diffusion_model.type=folder", "folder"),
        ("reward_model.type=transformers", "model_name"),
        ("evaluation.max_failure_rate=2", "max_failure_rate"),
        ("benchmark.data_path=x.json", "shapes only"),
        ("reward_model.params.batch_siz=4", "batch_size"),
        ("reward_model.params.readout=expected", "text"),
        ("reward_model.params.dtype=float8", "bfloat16"),
        ("reward_model.params.device_ids=[0, 0]", "different numbers"),
        ("benchmark.samples=0", "samples"),
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


def settings(tmp_path, *more, samples=3):
    given = [f"evaluation.output_dir={tmp_path / 'run'}", f"benchmark.samples={samples}", *more]
    return [part for one in given for part in ("--set", one)]


def test_filters_that_match_nothing_say_what_the_file_has(tmp_path, capsys):
    assert run(["vl_reward", "run", *settings(tmp_path, "benchmark.tags=[light]")]) == 2
    told = capsys.readouterr().err
    assert "no pair" in told
    assert "tags: colour, place" in told


def test_a_run_in_chinese_filtered_counted_exported_and_retried_from_its_folder_alone(tmp_path, capsys):
    ready = tmp_path / "ready"
    (ready / "physical").mkdir(parents=True)
    Image.new("RGB", (96, 96), "white").save(ready / "physical" / "0000.png")
    more = ["benchmark.language=zh", "benchmark.categories=[物理]", "benchmark.limit=2", "diffusion_model.type=folder"]
    more += [f"diffusion_model.params.folder={ready}", "evaluation.max_failure_rate=1"]
    command = settings(tmp_path, *more, samples=6)
    # A white picture has no shape in it, and another one is not there.
    assert run(["vl_reward", "run", *command]) == 3
    assert "edit_failed 1, judge_failed 1" in capsys.readouterr().out
    assert run(["run", "status", str(tmp_path / "run")]) == 3
    told = capsys.readouterr().out
    assert "1 model/edit_failed" in told
    assert "1 model/raised" in told
    assert run(["run", "export", str(tmp_path / "run"), "--to", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["id"], row["kind"]) for row in rows] == [("0000", "raised"), ("0002", "edit_failed")]
    record = make_records(6)[2]
    source = Image.open(io.BytesIO(base64.b64decode(record["src_img_b64"])))
    edit_picture(source, record["edit_instruction"]).save(ready / "physical" / "0002.png")
    assert run(["run", "retry", str(tmp_path / "run"), "--kind", "model/edit_failed", *command]) == 3
    assert "judge_failed 1, ok 1" in capsys.readouterr().out
    assert "make it" not in (tmp_path / "run" / "gallery.html").read_text()
    assert (
        run(["vl_reward", "gallery", *settings(tmp_path, *more[:2], *more[3:], samples=6)]) == 0
    )  # more pairs than ran
    assert "pending" in (tmp_path / "run" / "report.md").read_text()


def test_runs_over_other_benchmarks_or_scales_are_not_compared(tmp_path, capsys):
    def write(name, metric="number", **sources):
        (tmp_path / name).mkdir()
        samples = [
            {"id": one, "category": "a", "status": "ok", "score": 1.0, "source": source}
            for one, source in sources.items()
        ]
        text = json.dumps({"metric": {"kind": metric}, "judge": {"model": name[0]}, "samples": samples})
        (tmp_path / name / "report.json").write_text(text)
        return str(tmp_path / name)

    same, twin = write("a", x="1", y="2"), write("a2", x="1", y="2")
    assert run(["vl_reward", "compare", same, twin]) == 0
    assert "judges differ" not in capsys.readouterr().out
    assert run(["vl_reward", "compare", same, write("b", x="1", z="3")]) == 0
    assert "the judges differ" in capsys.readouterr().out
    for other, words in (
        (write("c", x="7", y="2"), "other pictures under one id: x"),
        (write("d", p="1"), "no id in common"),
        (write("e", "yes_no", x="1", y="2"), "different scales"),
        (str(tmp_path / "nowhere"), "has no report.json"),
    ):
        assert run(["vl_reward", "compare", same, other]) == 2
        assert words in capsys.readouterr().err


def test_a_folder_without_a_run_has_no_gallery_and_one_without_scores_has(tmp_path, capsys):
    assert run(["vl_reward", "gallery", *settings(tmp_path)]) == 2
    assert "run it first" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run(["vl_reward", "run", *settings(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "run" / "scores")
    next((tmp_path / "run" / "pictures").rglob("*.png")).unlink()
    assert run(["vl_reward", "gallery", *settings(tmp_path)]) == 0
    assert "after: cannot be read" in (tmp_path / "run" / "gallery.html").read_text()
    assert "pending 3" in (tmp_path / "run" / "report.md").read_text()


def test_two_processes_do_not_share_a_run_folder_and_drafts_of_a_killed_one_go(tmp_path, capsys):
    draft = tmp_path / "run" / "pictures" / "physical" / ".0000.png.0badcafe.part"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"half")
    with FileLock(tmp_path / "run" / ".run.lock"):
        assert run(["vl_reward", "run", *settings(tmp_path, samples=1)]) == 2
    assert "another process is using" in capsys.readouterr().err
    assert draft.exists()
    assert run(["vl_reward", "run", *settings(tmp_path, samples=1)]) == 0
    assert not draft.exists()


@pytest.mark.timeout(900)
def test_the_starting_files_run_as_the_note_says(tmp_path):
    assert run(["init", "vl_reward", "--out", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "config_multi_gpu.yaml", "main.py"]
    command = [sys.executable, "main.py", "--config", "config.yaml", "--set", "benchmark.samples=6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "| all | 6 | 6 |" in done.stdout
    assert (tmp_path / "outputs" / "gallery.html").is_file()


def test_the_settings_for_several_gpus_are_understood_and_need_none(tmp_path):
    assert run(["init", "vl_reward", "--out", str(tmp_path)]) == 0
    config = load_config(RewardConfig, tmp_path / "config_multi_gpu.yaml")
    assert len(make_editors(config)) == 6
    assert list(config.reward_model.params.device_ids) == [0, 1]
    assert config.reward_model.params.batch_size == 8
    check_judge(config.reward_model)


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
    assert judge.failures[1].kind == "no_number"
    assert judge.score(image, "s", question) == 10.0
    with pytest.raises(BatchError, match="every picture"):
        judge.batch_score([image], ["s", "s"], [question])
    with pytest.raises(ConfigError, match="folder or a backend"):
        Qwen3VLRewardModel()


class Full(ShapesJudge):
    """No memory for more than one, and nothing to say of the last."""

    def judge(self, prepared):
        if len(prepared) > 1:
            raise MemoryError("CUDA out of memory")
        return super().judge(prepared)


def test_batches_and_what_fails_are_told_in_the_words_of_the_note():
    image = Image.new("RGB", (8, 8), "white")
    image.putpixel((2, 4), (200, 40, 40))
    question = "It was asked: Paint the square red. Answer as"
    said = []
    judge = Qwen3VLRewardModel(backend=ShapesJudge({"2": "no idea"}), say=said.append)
    scores = judge.batch_score(images=[image] * 3, system_prompts=["s"] * 3, user_prompts=[question] * 3, padding=True)
    assert scores == [10.0, 10.0, None]
    assert said == [
        "[Qwen3VLRewardModel] Batch scoring 3 images with batch_size=4",
        "[Qwen3VLRewardModel] Processed batch 0-2: avg_score=10.000 (1 without a score)",
    ]
    said.clear()
    full = Qwen3VLRewardModel(backend=Full(), say=said.append)
    assert full.batch_score([image] * 2, ["s"] * 2, [question] * 2) == [10.0, 10.0]
    assert said[1:] == [
        "[Qwen3VLRewardModel] Error in batch 0-1: MemoryError: CUDA out of memory",
        "[Qwen3VLRewardModel] Falling back to sequential processing for this batch...",
        "[Qwen3VLRewardModel] Processed image 0: score=10.000",
        "[Qwen3VLRewardModel] Processed image 1: score=10.000",
    ]
    assert judge.batch_score(images=[image], system_prompts=["s"], user_prompts=[question], padding=False) == [10.0]
    with pytest.raises(BatchError, match="once"):
        judge.batch_score([image], ["s"], [question], images=[image])


def test_settings_are_plain_values():
    config = RewardConfig(
        benchmark=BenchmarkSettings(samples=3),
        diffusion_model=EditorSettings(type="folder", params=EditorParams(folder=Path("x"))),
        evaluation=RewardEvaluationSettings(metric="yes_no"),
    )
    assert config.benchmark.wanted().language == "en"


def test_batches_are_consecutive_images_and_one_that_fails_is_judged_image_by_image():
    image = Image.new("RGB", (8, 8), "white")
    image.putpixel((2, 4), (200, 40, 40))
    question = "It was asked: Paint the square red. Answer as"
    said, failures = [], []

    class Sometimes(ShapesJudge):
        def judge(self, prepared):
            if len(prepared) == 4 and not failures:
                failures.append(len(prepared))
                raise RuntimeError("CUDA out of memory")
            return super().judge(prepared)

    judge = Qwen3VLRewardModel(backend=Sometimes(), say=said.append)
    assert judge.batch_score([image] * 10, "s", question, batch_size=4) == [10.0] * 10
    name = "[Qwen3VLRewardModel]"
    assert said == [
        f"{name} Batch scoring 10 images with batch_size=4",
        f"{name} Error in batch 0-3: RuntimeError: CUDA out of memory",
        f"{name} Falling back to sequential processing for this batch...",
        *(f"{name} Processed image {at}: score=10.000" for at in range(4)),
        f"{name} Processed batch 4-7: avg_score=10.000",
        f"{name} Processed batch 8-9: avg_score=10.000",
    ]


def test_the_names_and_arguments_of_the_original_judge():
    model, processor = qwen3_vl()
    readout = Generate(Generation(temperature=0.0, max_new_tokens=20), scale=Scale(), structured="json")
    backend = model_backend(model, processor, readout, Limits(), name="tiny")
    judge, images = Qwen3VLRewardModel(backend=backend, say=lambda _: None), [Image.new("RGB", (64, 64), "red")] * 3
    scores = judge.batch_score(images=images, batch_size=4, padding=True)
    assert all(0 <= score <= 10 for score in scores)
    assert judge._batch_score_sequential(images, [SYSTEM_PROMPT] * 3, [USER_PROMPT] * 3) == scores
    assert judge._build_messages(images[0], "judge", "how good?") == [
        {"role": "system", "content": [{"type": "text", "text": "judge"}]},
        {"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": "how good?"}]},
    ]
    compared = judge._build_messages(images[0], "judge", "how good?", images[1])
    assert [part["image"] for part in compared[1]["content"] if part["type"] == "image"] == [images[1], images[0]]
    seen, tokenizer = [], judge.processor.tokenizer
    tokenizer.padding_side = "right"
    judge._backend = Watching(judge._backend, seen, tokenizer)
    judge.batch_score(images=images)
    with pytest.raises(ConfigError):
        judge.batch_score(images=images, user_prompts="raise")
    assert seen == ["left", "left"]
    assert tokenizer.padding_side == "right"


class Watching:
    """Notes the padding side while it judges."""

    def __init__(self, inner, seen, tokenizer):
        self.inner, self.seen, self.tokenizer = inner, seen, tokenizer
        self.cost, self.prepare = inner.cost, inner.prepare

    def judge(self, prepared):
        self.seen.append(self.tokenizer.padding_side)
        if len(self.seen) > 1:
            raise ConfigError("no", seen="no", do="no")
        return self.inner.judge(prepared)
