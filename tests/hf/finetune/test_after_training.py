"""What a finished `train hf` run is good for: generate, evaluate, load with peft from anywhere, merge, four bits."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch
import transformers

from tests.hf.finetune.folders import chat, model_folder, tokenizer, write_lines
from tests.hf.finetune.test_system import DATA, KINDS, folder, loaded, losses, train  # noqa: F401
from truebatch.cli.app import run
from truebatch.hf.finetune.chat_template import turn_end_ids
from truebatch.training.load_trained import open_trained
from truebatch.training.logging.metrics_jsonl import read_metrics

TASKS = [next(iter(DATA)), *(pytest.param(task, marks=pytest.mark.slow) for task in list(DATA)[1:])]
QUESTION, ANSWER = "what is the colour of the grass", "blue and red"


def train_to_answer(*more: str) -> None:
    write_lines(Path("causal_lm.jsonl"), [chat(QUESTION, ANSWER), chat("hello the sky", "green")] * 4)
    assert train("causal_lm", "--set", "train.epochs=25", "--set", "train.learning_rate=2e-2", *more) == 0


def generated(capsys, *prompts: str, where: str = "runs/hf") -> list[str]:
    capsys.readouterr()
    given = [part for text in prompts for part in ("--prompt", text)]
    assert run(["generate", where, *given, "--temperature", "0", "--json", "--max-new-tokens", "12"]) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


def test_a_trained_model_answers_questions_as_it_was_taught_even_when_its_data_is_gone(folder, capsys):  # noqa: F811
    train_to_answer()
    assert generated(capsys, QUESTION, "hello the sky") == [ANSWER, "green"]
    Path("causal_lm.jsonl").unlink()
    assert generated(capsys, "hello the sky") == ["green"]


def test_an_answer_ends_where_the_template_ends_it():
    made = tokenizer()
    assert turn_end_ids(made) == {made.convert_tokens_to_ids("<|end|>")}
    assert turn_end_ids(tokenizer(None)) == set()


@pytest.mark.slow
def test_plain_text_is_continued_from_where_it_stops(folder, capsys):  # noqa: F811
    write_lines(folder / "causal_lm.jsonl", [{"text": "the sky blue and red"}, {"text": "green the grass hello"}] * 4)
    assert train("causal_lm", "--set", "train.epochs=25", "--set", "train.learning_rate=2e-2") == 0
    assert generated(capsys, "the sky") == [" blue and red"]


def greedy_alone(model, text: str) -> str:
    """Token by token without a cache, from the encoder's own call on one source."""
    made = tokenizer()
    ids = torch.tensor([made(text)["input_ids"]])
    new = [model.config.decoder_start_token_id]
    for _ in range(12):
        logits = model(input_ids=ids, decoder_input_ids=torch.tensor([new])).logits[0, -1]
        new.append(int(logits.argmax()))
        if new[-1] == made.eos_token_id:
            break
    return made.decode(new[1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_an_encoder_decoder_writes_for_many_sources_what_it_writes_for_one(folder, capsys):  # noqa: F811
    assert train("seq2seq", "--set", "train.epochs=6", "--set", "train.learning_rate=1e-2") == 0
    sources = ["the sky", "the sky the sky the sky the grass", "green"]
    model = loaded("seq2seq").eval()
    with torch.no_grad():
        assert generated(capsys, *sources) == [greedy_alone(model, text) for text in sources]


def test_a_classifier_writes_no_text_and_says_what_to_do(folder, capsys):  # noqa: F811
    assert train("sequence_classification") == 0
    capsys.readouterr()
    assert run(["generate", "runs/hf", "--prompt", "a"]) == 2
    assert "truebatch evaluate" in capsys.readouterr().err


def evaluated(capsys, task: str) -> dict[str, float]:
    capsys.readouterr()
    assert run(["evaluate", "runs/hf", "--json", "--set", f"validation={task}.jsonl"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_evaluated_as_its_own_model_would_one_by_one(folder, capsys, task):  # noqa: F811
    assert train(task, "--set", "train.epochs=3", "--set", "train.learning_rate=1e-2") == 0
    figures = evaluated(capsys, task)
    assert figures["samples"] == len(DATA[task])
    if not task.endswith("classification"):
        assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
        return
    lines = Path("runs/hf/evaluation/predictions.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    assert [one["sample"] for one in said] == list(range(len(DATA[task])))
    model, made = loaded(task).eval(), tokenizer()
    hits = []
    for sample, one in zip(DATA[task], said, strict=True):
        assert one["label"] == ([sample["label"]] if "label" in sample else sample["tags"])
        is_split = "tokens" in sample
        encoded = made(sample["tokens"] if is_split else sample["text"], is_split_into_words=is_split)
        with torch.no_grad():
            found = model(torch.tensor([encoded["input_ids"]])).logits.argmax(-1).reshape(-1).tolist()
        if is_split:
            words = encoded.word_ids()
            found = [found[at] for at, word in enumerate(words) if word is not None and word not in words[:at]]
        assert one["predicted"] == [model.config.id2label[at] for at in found]
        hits += [a == b for a, b in zip(one["predicted"], one["label"], strict=True)]
    assert figures["accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_without_held_out_samples_evaluate_says_how_to_give_some(folder, capsys):  # noqa: F811
    assert train("causal_lm") == 0
    capsys.readouterr()
    assert run(["evaluate", "runs/hf"]) == 2
    assert "--set validation=FILE" in capsys.readouterr().err


def test_others_may_read_what_was_exported(folder):  # noqa: F811
    before = os.umask(0o022)
    try:
        assert train("causal_lm") == 0
    finally:
        os.umask(before)
    for file in Path("runs/hf/model").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file


@pytest.mark.parametrize("task", TASKS)
def test_the_printed_line_loads_the_adapter_from_any_folder(folder, capsys, monkeypatch, task):  # noqa: F811
    peft = pytest.importorskip("peft")
    assert train(task, "--lora", "--set", "train.learning_rate=1e-2", "--out", str(folder / "run")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next")]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    model = eval(line.partition("in Python: ")[2], {"peft": peft})
    assert any(bool(value.any()) for name, value in model.state_dict().items() if "lora_B" in name)
    if "truebatch generate" in line:
        monkeypatch.chdir(folder)
        assert run(["generate", str(folder / "run"), "--prompt", "the", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("task", TASKS)
def test_a_merged_export_is_a_plain_model_that_says_what_the_adapted_one_says(folder, task):  # noqa: F811
    peft = pytest.importorskip("peft")
    more = ["--lora", "--set", "train.epochs=4", "--set", "train.learning_rate=1e-2"]
    assert train(task, *more, "--out", "runs/alone") == 0
    assert train(task, *more, "--set", "merge_lora=true", "--out", "runs/merged") == 0
    merged = loaded(task, "runs/merged/model").eval()
    is_classifier = "classification" in task
    classes = {"num_labels": 3 if task.startswith("sequence") else 2, "ignore_mismatched_sizes": True}
    names = {"causal_lm": "CausalLM", "seq2seq": "Seq2SeqLM", "sequence_classification": "SequenceClassification"}
    kind = getattr(peft, f"AutoPeftModelFor{names.get(task, 'TokenClassification')}")
    adapted = kind.from_pretrained("runs/alone/model", **(classes if is_classifier else {})).eval()
    ids = torch.arange(8, 20)[None]
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids[:, :5]} if task == "seq2seq" else {})}
    with torch.no_grad():
        ours, theirs, base = (m(**inputs).logits for m in (merged, adapted, _base(task)))
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    if not is_classifier:
        assert (ours - base).norm() > 1e-3 * base.norm()


def _base(task: str):
    return loaded(task, KINDS[task]).eval()


@pytest.mark.parametrize("setting", ["merge_lora", "load_in_4bit"])
def test_settings_of_adapters_need_an_adapter(folder, capsys, setting):  # noqa: F811
    assert train("causal_lm", "--set", f"{setting}=true") == 2
    assert "add --lora" in capsys.readouterr().err


def test_without_bitsandbytes_four_bits_say_how_to_get_it(folder, capsys, monkeypatch):  # noqa: F811
    pytest.importorskip("peft")
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    assert train("causal_lm", "--lora", "--set", "load_in_4bit=true") == 2
    assert "pip install 'truebatch[qlora]'" in capsys.readouterr().err


def test_a_base_of_four_bits_is_trained_beside_and_merged_as_it_was(folder):  # noqa: F811
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    model_folder(Path("llama"))
    more = ["--lora", "--set", "load_in_4bit=true", "--set", "train.epochs=6", "--set", "train.learning_rate=1e-2"]
    assert train("causal_lm", *more, "--set", "merge_lora=true") == 0
    assert read_metrics(Path("runs/hf/metrics.jsonl"))[0]["equality"]["verdict"] == "equal"
    assert losses()[-1] < losses()[0]
    trained = open_trained(Path("runs/hf")).model
    assert any("Linear4bit" in type(module).__name__ for module in trained.modules())
    ids = torch.arange(8, 20)[None]
    with torch.no_grad():
        ours, theirs = loaded("causal_lm").eval()(ids).logits, trained(ids).logits
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert transformers.AutoConfig.from_pretrained("runs/hf/model").to_dict().get("quantization_config") is None


def test_a_run_beside_a_base_of_four_bits_resumes_with_the_same_bits(folder):  # noqa: F811
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    more = ["--lora", "--set", "load_in_4bit=true", "--set", "train.learning_rate=1e-2"]
    model_folder(Path("llama"))
    assert train("causal_lm", *more) == 0
    assert train("causal_lm", *more, "--set", "train.max_steps=1", "--out", "runs/cut") == 0
    assert train("causal_lm", *more, "--out", "runs/cut") == 0
    assert losses("runs/cut") == losses()
