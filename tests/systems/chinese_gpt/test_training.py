"""Runs of the system: equal whatever the cut, restarted exactly, in two stages, on two processes, in half precision."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.systems.chinese_gpt.small import DIALOGUES, SAMPLES, STATEMENTS, relative, small_model, weights_of
from tests.training.memory.test_oom_retry import Limited
from truebatch.batch.segments import cell_positions, padded_segments
from truebatch.cli.app import run as run_command
from truebatch.errors import RunError, TruebatchError
from truebatch.generation.config import Generation
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.testing.failpoints import armed
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, first_samples
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch.training.trainer import train
from truebatch_systems.chinese_gpt.config import ChineseTrainConfig
from truebatch_systems.chinese_gpt.data.prepare import best_weights, prepare
from truebatch_systems.chinese_gpt.data.samples import FIELDS
from truebatch_systems.chinese_gpt.eval.evaluate import measure_perplexity
from truebatch_systems.chinese_gpt.system import CHINESE_GPT
from truebatch_systems.chinese_gpt.train.objective import TERM, NextToken

SMALL = {"embedding_dim": 32, "hidden_dim": 64, "heads": 4, "layers": 1}
CONFIG = settings_type(CHINESE_GPT)
DATA = TrainData(samples=SAMPLES, fields=FIELDS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for stage, texts in (("pretraining", STATEMENTS), ("chat", DIALOGUES)):
        (folder / stage).mkdir()
        (folder / stage / "1.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    return folder


def config_of(corpus, *, train=None, **settings):
    return CONFIG(data=str(corpus), train=ChineseTrainConfig(**(train or {})), **{**SMALL, **settings})


def trained(corpus, out, *, train=None, **settings):
    said = []
    result = train_system(CHINESE_GPT, config_of(corpus, train=train, **settings), Start(out=out, say=said.append))
    return result, said


def weights_in(folder):
    return torch.cat([value.flatten().float() for name, value in sorted(best_weights(folder).items())])


def trained_weights(config, *, limit=48, dropout=0.0, objective=None):
    model = small_model(dropout=dropout)
    result = train(model, objective or NextToken(), first_samples(DATA, limit), config)
    return weights_of(model), result


def test_one_by_one_with_accumulation_and_true_batches_end_with_the_same_weights():
    common = {"epochs": 3, "samples_per_step": 8, "learning_rate": 1e-3}
    whole, first = trained_weights(TrainConfig(batch_size=8, **common))
    single, second = trained_weights(TrainConfig(batch_size=1, **common))
    packed, _ = trained_weights(TrainConfig(batch_size=8, layout="packed", **common))
    off, _ = trained_weights(TrainConfig(true_batch="off", **common))
    for other in (single, packed, off):
        assert relative(other, whole) < 1e-4
    losses = [[record["loss"] for record in result.records] for result in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_dropout_belongs_to_the_sample_so_that_the_cut_does_not_change_it():
    common = {"epochs": 1, "samples_per_step": 8, "learning_rate": 1e-3}
    whole, _ = trained_weights(TrainConfig(batch_size=8, **common), dropout=0.2)
    packed, _ = trained_weights(TrainConfig(batch_size=3, layout="packed", **common), dropout=0.2)
    assert relative(packed, whole) < 1e-4


def test_the_loss_of_a_corpus_does_not_depend_on_the_batch():
    model = small_model().eval()
    with torch.no_grad():
        alone = sum(float(_sum_alone(model, i)) for i in range(len(SAMPLES)))
    mean = alone / int(SAMPLES.num_labels.sum())
    assert math.log(measure_perplexity(model, SAMPLES)) == pytest.approx(mean, rel=1e-6)


def _sum_alone(model, i):
    ids = torch.as_tensor(SAMPLES[i]["input_ids"])[None]
    labels = torch.as_tensor(SAMPLES[i]["labels"])
    segments = padded_segments([ids.shape[1]])
    logits = model(ids, cell_positions(segments), segments)[0].double()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("settings", [{"layout": "packed"}, {}, {"grouping": "bucketed", "bucket_width": 8}])
def test_every_sample_is_in_every_epoch_exactly_once(size, settings):
    config = PlanConfig(samples=size, samples_per_step=16, **settings)
    for epoch in (0, 1):
        plan = build_plan(SAMPLES.lengths, config, epoch=epoch)
        seen = [int(i) for step in range(plan.num_steps) for rows in plan.step(step)[0] for i in rows.ids]
        assert sorted(seen) == list(range(len(SAMPLES)))


@pytest.mark.parametrize(
    ("place", "visit"), [("step.optimiser", 5), ("step.backward", 9), ("checkpoint.before_manifest", 2)]
)
def test_a_run_that_was_stopped_anywhere_ends_with_the_same_bits(corpus, tmp_path, place, visit):
    settings = {"epochs": 3, "batch_size": 16, "save_every": 3, "warmup_steps": 2, "patience": 2}
    whole, _ = trained(corpus, tmp_path / "whole", train=settings, dropout=0.1)
    with armed(f"{place}:eio:{visit}"), pytest.raises((OSError, TruebatchError)):
        trained(corpus, tmp_path / "cut", train=settings, dropout=0.1)
    again, _ = trained(corpus, tmp_path / "cut", train=settings, dropout=0.1)
    assert torch.equal(weights_in(tmp_path / "whole"), weights_in(tmp_path / "cut"))
    assert again.why == whole.why
    assert again.best_loss == whole.best_loss
    lines = [_losses(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    assert lines[0] == lines[1]


def _losses(file):
    records = [json.loads(line) for line in file.read_text().splitlines()]
    kept = {r["step"]: (r["loss"], r["learning_rate/main"]) for r in records if "learning_rate/main" in r}
    return [kept[step] for step in sorted(kept)]


def test_training_stops_when_validation_does_and_keeps_the_best(corpus, tmp_path):
    settings = {"epochs": 40, "batch_size": 16, "learning_rate": 2e-2, "min_learning_rate": 0, "patience": 1}
    result, _ = trained(corpus, tmp_path / "a", train=settings)
    assert result.why == "validation has not improved 1 times"
    model = CHINESE_GPT.prepare(config_of(corpus)).build_model()
    model.load_state_dict(dict(best_weights(tmp_path / "a")))
    ready = prepare(config_of(corpus))
    assert math.log(measure_perplexity(model.eval(), ready.validation)) == pytest.approx(result.best_loss, rel=1e-4)


def test_a_chat_stage_starts_from_the_weights_and_the_vocabulary_of_a_pretraining_stage(corpus, tmp_path):
    settings = {"epochs": 2, "batch_size": 16}
    trained(corpus, tmp_path / "first", train=settings, stage="pretraining")
    first = config_of(corpus, stage="pretraining")
    other = tmp_path / "chat.json"  # a corpus of its own, whose words the first stage never saw
    other.write_text(json.dumps([*DIALOGUES, "用户：鲲鹏？助手：鲲鹏。"] * 2, ensure_ascii=False), encoding="utf-8")
    second = replace(first, data=str(other), stage="chat", start_from=tmp_path / "first")
    assert prepare(second).vocab.hash == prepare(first).vocab.hash
    task = CHINESE_GPT.prepare(second)
    model = task.build_model()
    assert torch.equal(weights_in(tmp_path / "first"), torch.cat(
        [value.flatten().float() for _, value in sorted(model.state_dict().items())]
    ))  # fmt: skip
    lines = task.commands.describe()
    assert any("from the run it starts from" in line for line in lines)
    result = train_system(CHINESE_GPT, second, Start(out=tmp_path / "second"))
    assert result.step > 0
    assert not torch.equal(weights_in(tmp_path / "first"), weights_in(tmp_path / "second"))


def test_a_folder_without_a_run_is_nothing_to_start_from(corpus, tmp_path):
    with pytest.raises(RunError, match="nothing to start from"):
        prepare(config_of(corpus, start_from=tmp_path))


def test_half_precision_is_close_to_whole_precision():
    common = {"epochs": 2, "samples_per_step": 16, "learning_rate": 1e-3}
    _, whole = trained_weights(TrainConfig(batch_size=16, layout="packed", **common))
    _, half = trained_weights(TrainConfig(batch_size=16, layout="packed", precision="bf16", **common))
    _, alone = trained_weights(TrainConfig(true_batch="off", precision="bf16", **common))
    final = [result.records[-1]["loss"] for result in (whole, half, alone)]
    assert abs(final[1] - final[0]) <= 2 * abs(final[2] - final[0]) + 1e-2


def test_a_step_that_does_not_fit_is_cut_smaller_and_gives_the_same_weights():
    config = TrainConfig(epochs=1, batch_size=16, learning_rate=1e-3)
    whole, _ = trained_weights(config, limit=32)
    limited = Limited(NextToken(), limit=200)
    small, _ = trained_weights(config, limit=32, objective=limited)
    assert max(len(ids) for ids in limited.ran) == 16  # it was tried whole
    assert relative(small, whole) < 1e-5


def test_batches_can_be_compared_with_one_by_one_in_the_run_itself(corpus, tmp_path):
    settings = {"epochs": 1, "batch_size": 16, "true_batch": "compare", "max_steps": 3, "layout": "packed"}
    _, said = trained(corpus, tmp_path / "a", train=settings, dropout=0.1)
    assert sum("true batches differ from one by one" in line for line in said) == 3


def test_the_learning_rate_is_the_closed_form_and_ends_with_the_least():
    config = ChineseTrainConfig(learning_rate=2e-3, warmup_steps=4, min_learning_rate=2e-5)
    for shape, restarts in (("cosine", 1), ("cosine_restarts", 3)):
        schedule = replace(config, schedule=shape, restarts=restarts).lr_schedule()
        for total in (20, 21, 23):
            rates = [2e-3 * schedule.factor(step, total) for step in range(total)]
            assert rates[:4] == pytest.approx([2e-3 * (step + 1) / 5 for step in range(4)])
            assert rates[-1] == pytest.approx(2e-5)
            assert rates[4] == pytest.approx(2e-3)
    plain = config.lr_schedule()
    for step in range(4, 24):
        expected = 2e-5 + (2e-3 - 2e-5) * (1 + math.cos(math.pi * (step - 4) / 19)) / 2
        assert 2e-3 * plain.factor(step, 24) == pytest.approx(expected)


def test_ten_lines_of_python_train_evaluate_and_answer(corpus, tmp_path):
    config = config_of(corpus, train={"epochs": 4, "batch_size": 4, "warmup_steps": 5, "choose": ("layout",)})
    train_system(CHINESE_GPT, config, Start(out=tmp_path / "run"))
    task = CHINESE_GPT.prepare(config)
    model = task.build_model()
    model.load_state_dict(dict(best_weights(tmp_path / "run")))
    figures = task.commands.evaluate(model.eval(), task.test(), tmp_path)
    assert figures["perplexity"] < figures["unigram_perplexity"]
    assert figures["answers_asked"] == len((tmp_path / "answers.jsonl").read_text().splitlines())
    said = list(CHINESE_GPT.generate(config, model, ["湖北的省会是什么？"], Generation(max_new_tokens=5)))
    assert all(number == 0 for number, _ in said)


def test_the_command_trains_goes_on_and_evaluates(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    common = ["train", "chinese_gpt", "--data", str(corpus), *sizes, "--set", "train.epochs=1", "--log-format", "plain"]
    assert run_command([*common, "--dry-run"]) == 0
    foreseen = capsys.readouterr().out
    assert "batch size 4: chosen for" in foreseen
    assert "memory, GiB" in foreseen
    assert run_command(common) == 0
    said = capsys.readouterr()
    assert "layout: " in said.out + said.err
    assert run_command(common) == 0
    assert "done before" in "".join(capsys.readouterr())
    assert run_command(["evaluate", "runs/chinese_gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert run_command(["train", "chinese_gpt", "--data", "embeded"]) == 2
    assert "did you mean 'embedded'" in capsys.readouterr().err


@pytest.mark.xdist_group("processes")
def test_two_processes_end_with_the_weights_of_one(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(Path(__file__).parents[3])
    sizes = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    common = ["train", "chinese_gpt", "--data", str(corpus), *sizes, "--set", "train.max_steps=6"]
    common += ["--set", "train.layout=packed", "--log-format", "plain"]
    for name, devices in (("one", "1"), ("two", "2")):
        assert run_command([*common, "--out", str(tmp_path / name), "--devices", devices]) == 0
    assert relative(weights_in(tmp_path / "two"), weights_in(tmp_path / "one")) < 1e-5


def test_a_run_refuses_other_texts(corpus, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    settings = {"epochs": 1, "batch_size": 16, "max_steps": 2}
    trained(folder, tmp_path / "run", train=settings)
    file = folder / "pretraining" / "1.json"
    file.write_text(json.dumps([*STATEMENTS[1:], "另一句话。"], ensure_ascii=False), encoding="utf-8")
    with pytest.raises(RunError, match="not what this run began with"):
        trained(folder, tmp_path / "run", train={**settings, "max_steps": 4})


def test_a_trained_run_speaks_without_its_corpus_and_is_measured_on_another(corpus, tmp_path, capsys):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    trained(folder, tmp_path / "run", train={"epochs": 1, "batch_size": 16, "max_steps": 4})
    command = ["generate", str(tmp_path / "run"), "--prompt", "你好", "--temperature", "0", "--max-new-tokens", "4"]
    assert run_command(command) == 0
    before = capsys.readouterr().out
    evaluate = ["evaluate", str(tmp_path / "run"), "--json"]
    assert run_command(evaluate) == 0
    own = json.loads(capsys.readouterr().out)
    # Words the model never saw move all ids of a vocabulary made now; the model goes by its own.
    (folder / "chat" / "2.json").write_text(
        json.dumps(["一丁七万", "丈三上下"] * 9, ensure_ascii=False), encoding="utf-8"
    )
    assert run_command(evaluate) == 0
    grown = json.loads(capsys.readouterr().out)
    assert grown["dialogues"]["perplexity"] == pytest.approx(own["dialogues"]["perplexity"], rel=1e-6)
    shutil.rmtree(folder)
    assert run_command(command) == 0
    assert capsys.readouterr().out == before
    assert run_command(evaluate) == 2
    assert "there is no" in capsys.readouterr().err


def test_the_plan_knows_the_count_of_every_sample(corpus):
    config = config_of(corpus)
    measured = CHINESE_GPT.prepare(config).measured_data().measured
    assert measured.counts[TERM].tolist() == prepare(config).train.num_labels.tolist()
