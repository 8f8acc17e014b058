"""`truebatch train hf`: the user's own model and data, from file to a folder that plain transformers loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.hf.finetune.folders import chat, chats, model_folder, tokenizer, write_lines
from truebatch.cli.app import run
from truebatch.hf import pretrained
from truebatch.hf.finetune.tokenize import FileTokenizer, encode_file
from truebatch.training.checkpoint.retention import best_step
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.logging.metrics_jsonl import read_metrics

WORDS = ["the", "sky", "grass"]
DATA = {
    "causal_lm": chats(),
    "sequence_classification": [
        {"text": "green " * (1 + i % 5), "label": ("no", "yes", "so")[i % 3]} for i in range(12)
    ],
    "token_classification": [{"tokens": WORDS * (1 + i % 4), "tags": ["O", "B", "B"] * (1 + i % 4)} for i in range(12)],
    "seq2seq": [{"source": "the sky " * (1 + i % 4), "target": "blue " * (1 + i % 3)} for i in range(12)],
}
KINDS = {"causal_lm": "llama", "sequence_classification": "bert", "token_classification": "bert", "seq2seq": "t5"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    for task, lines in DATA.items():
        write_lines(tmp_path / f"{task}.jsonl", lines)
    return tmp_path


def train(task: str = "causal_lm", *more: str) -> int:
    kind = KINDS[task]
    if not Path(kind).exists():
        model_folder(Path(kind), kind)
    given = [
        "train",
        "hf",
        "--model",
        kind,
        "--data",
        f"{task}.jsonl",
        "--task",
        task,
        "--set",
        "train.samples_per_step=4",
    ]
    return run([*given, *more])


def losses(where: str = "runs/hf") -> list[float]:
    return [r["loss"] for r in read_metrics(Path(where) / "metrics.jsonl") if "loss" in r]


def loaded(task: str, where: str = "runs/hf/model"):
    names = {
        "causal_lm": "AutoModelForCausalLM", "sequence_classification": "AutoModelForSequenceClassification",
        "token_classification": "AutoModelForTokenClassification", "seq2seq": "AutoModelForSeq2SeqLM",
    }  # fmt: skip
    return getattr(transformers, names[task]).from_pretrained(where)


@pytest.mark.parametrize("task", DATA)
def test_every_task_trains_and_plain_transformers_loads_the_model(folder, capsys, task):
    assert train(task, "--set", "train.epochs=8", "--set", "train.learning_rate=1e-2", "--set", "dropout=false") == 0
    out = capsys.readouterr().out
    assert losses()[-1] < losses()[0]
    model = loaded(task)
    saved = load_newest(Path("runs/hf/checkpoints")).checkpoint.parts["model"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    assert AutoTokenizer.from_pretrained("runs/hf/model").get_vocab() == tokenizer().get_vocab()
    assert f"layout: {'padded' if task == 'sequence_classification' else 'packed'}, proven equal" in out
    (following,) = [line for line in out.splitlines() if line.startswith("next: truebatch ")]
    assert run(following.split()[2:]) == 0


def one_by_one(task: str) -> float:
    """The loss of all samples at the weights of the folder, one call a sample, divided once."""
    encoder = FileTokenizer(
        task=task,
        tokenizer=tokenizer(),
        fingerprint="",
        known_labels={},
        max_length=None,
        overlong="refuse",
        cache=None,
    )
    encoded = encode_file(encoder, Path(f"{task}.jsonl"))
    model = loaded(task, KINDS[task]).eval()
    total, count = 0.0, 0
    for sample in encoded:
        ids, labels = torch.tensor(sample["input_ids"])[None], torch.tensor(sample["labels"])[None]
        number = int(((labels[:, 1:] if task == "causal_lm" else labels) != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss.detach()) * number
        count += number
    return total / count


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq"])
def test_the_loss_is_that_of_the_models_own_forward_one_by_one(folder, task):
    plain = ("--set", "train.samples_per_step=12", "--set", "train.learning_rate=0.0", "--set", "dropout=false")
    assert train(task, *plain) == 0
    assert losses() == pytest.approx([one_by_one(task)], rel=1e-6)


def test_computing_activations_again_changes_nothing(folder):
    assert train("causal_lm", "--set", "train.learning_rate=1e-2", "--out", "kept") == 0
    more = ["--set", "train.gradient_checkpointing=true", "--set", "train.learning_rate=1e-2", "--out", "again"]
    assert train("causal_lm", *more) == 0
    assert losses("again") == losses("kept")


def test_the_question_is_never_learned(folder):
    """The same questions with other answers: only what the answers say may move the loss of the answers."""
    write_lines(folder / "causal_lm.jsonl", [chat("what is the colour of the grass", "blue")] * 8)
    assert train("causal_lm", "--set", "train.epochs=20", "--set", "train.learning_rate=2e-2") == 0
    made = tokenizer()
    model = loaded("causal_lm").eval()
    ids = made.apply_chat_template(
        [{"role": "user", "content": "what is the colour of the grass"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    answer = made("blue<|end|>", add_special_tokens=False)["input_ids"]
    for expected in answer:
        logits = model(input_ids=ids).logits[0, -1]
        assert int(logits.argmax()) == expected
        ids = torch.cat([ids, torch.tensor([[expected]])], 1)
    before = loaded("causal_lm", "llama").eval()
    question = ids[:, : -len(answer)]
    for one in (before, model):
        assert float(one(input_ids=question, labels=question).loss.detach()) > 2.0


def test_dropout_is_drawn_for_each_sample_or_off_and_as_it_was_in_what_is_saved(folder, capsys):
    assert train("causal_lm") == 0
    assert "dropout is drawn for each sample (attention_dropout=0.1)" in capsys.readouterr().out
    assert loaded("causal_lm").config.attention_dropout == 0.1
    kept = read_metrics(Path("runs/hf/metrics.jsonl"))
    assert kept[0]["equality"]["verdict"] == "equal"
    Path("runs/hf").rename("runs/keyed")
    assert train("causal_lm", "--set", "dropout=false") == 0
    assert "dropout is set to 0 for training (was attention_dropout=0.1)" in capsys.readouterr().out
    assert read_metrics(Path("runs/hf/metrics.jsonl"))[0]["loss"] != kept[0]["loss"]
    assert loaded("causal_lm").config.attention_dropout == 0.1
    assert read_metrics(Path("runs/hf/metrics.jsonl"))[0]["equality"]["verdict"] == "equal"
    assert train("causal_lm", "--out", "runs/kept", "--set", "train.allow=[dropout]") == 0
    assert "equality: in distribution (dropout allowed by name)" in capsys.readouterr().out


def test_the_names_of_the_classes_are_stored_with_the_model(folder, capsys):
    assert train("sequence_classification") == 0
    out = capsys.readouterr().out
    assert "labels: no 4, so 4, yes 4" in out
    assert "new weights, drawn from seed 0: classifier.bias, classifier.weight" in out
    model = AutoModelForSequenceClassification.from_pretrained("runs/hf/model")
    assert model.config.id2label == {0: "no", 1: "so", 2: "yes"}
    assert model.config.label2id == {"no": 0, "so": 1, "yes": 2}


def test_with_validation_the_best_model_is_the_one_that_is_kept(folder):
    write_lines(folder / "held.jsonl", [chat("what is the colour of the sky", "red and white")] * 4)
    more = ["--validation", "held.jsonl", "--set", "train.epochs=6", "--set", "train.learning_rate=0.1"]
    assert train("causal_lm", *more) == 0
    validated = [r for r in read_metrics(Path("runs/hf/metrics.jsonl")) if "validation_loss" in r]
    best = min(validated, key=lambda r: r["validation_loss"])
    assert best["step"] == best_step(Path("runs/hf/checkpoints"))
    assert best["step"] < validated[-1]["step"]
    encoder = FileTokenizer(
        task="causal_lm", tokenizer=tokenizer(), fingerprint="", known_labels={}, max_length=None, overlong="refuse",
        cache=None,
    )  # fmt: skip
    sample = encode_file(encoder, Path("held.jsonl"))[0]
    ids, labels = torch.tensor(sample["input_ids"])[None], torch.tensor(sample["labels"])[None]
    loss = float(loaded("causal_lm").eval()(input_ids=ids, labels=labels).loss.detach())
    assert loss == pytest.approx(best["validation_loss"], rel=1e-5)


def test_a_run_goes_on_with_the_layout_it_began_with_and_only_with_its_own_data(folder, capsys):
    assert train("causal_lm", "--set", "train.max_steps=1") == 0
    capsys.readouterr()
    assert train("causal_lm", "--set", "train.max_steps=3") == 0
    out = capsys.readouterr().out
    assert "resuming after step 1" in out
    assert "proven" not in out
    assert "step 3/3" in out
    whole = losses()
    assert train("causal_lm", "--out", "runs/whole", "--set", "train.max_steps=3") == 0
    assert losses("runs/whole") == whole
    changed = chats()
    changed[3]["messages"][0]["content"] = changed[3]["messages"][0]["content"].replace("grass", "green")
    write_lines(folder / "causal_lm.jsonl", changed)
    assert train("causal_lm", "--set", "train.max_steps=3") == 2
    assert "the data is not what this run began with" in capsys.readouterr().err


def test_a_dry_run_of_an_encoder_decoder_knows_the_memory_of_both_layouts(folder, capsys):
    capsys.readouterr()
    assert train("seq2seq", "--dry-run", "--log-format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {plan["memory_gib"] >= 0 for plan in said["plans"].values()} == {True}


def test_a_dry_run_shows_both_layouts_and_loads_no_weights(folder, capsys):
    model_folder(Path("llama"))
    Path("llama/model.safetensors").write_bytes(b"not weights")
    assert train("causal_lm", "--dry-run", "--log-format", "json") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans["packed"]["fill"] == 1.0
    assert plans["padded"]["fill"] < 1.0
    assert plans["packed"]["steps"] == plans["padded"]["steps"] == 3
    assert min(plan["memory_gib"] for plan in plans.values()) >= 0
    assert train("causal_lm") == 2
    assert "the model in llama cannot be loaded" in capsys.readouterr().err


WRONG = {
    "--model nowhere": "hf download NAME --local-dir nowhere",
    "--data nowhere.jsonl": "no file nowhere.jsonl",
    "--data seq2seq.jsonl": "it looks like data for --task seq2seq",
    "--task seq2seq": "seq2seq",
    "--set max_length=5": "12 of 12 samples have more than 5 tokens",
    "--set max_lenght=5": "did you mean 'max_length'",
    "--set chat_template=nowhere.jinja": "no file nowhere.jinja",
    "--set overlong=shorten": "overlong",
    "--validation sequence_classification.jsonl --set train.limit=1": "",
}


@pytest.mark.parametrize("more", WRONG)
def test_a_mistake_is_said_before_anything_is_trained(folder, capsys, more):
    code = train("causal_lm", *more.split())
    if not WRONG[more]:
        assert code == 0  # Text beside a label is still text.
        return
    assert code == 2
    error = capsys.readouterr().err
    assert WRONG[more] in error
    assert error.count("\n") == 3
    assert not Path("runs").exists()


def test_positions_end_where_the_model_says_so(folder, capsys):
    long = [{"text": "green blue red " * 40, "label": n} for n in (0, 1)]
    write_lines(folder / "sequence_classification.jsonl", long)
    assert train("sequence_classification") == 2
    assert "2 of 2 samples have more than 96 tokens" in capsys.readouterr().err
    assert train("sequence_classification", "--set", "max_length=500") == 2
    assert "max_length=500, positions 96" in capsys.readouterr().err
    write_lines(folder / "seq2seq.jsonl", [{"source": "green blue red " * 400, "target": "blue"}] * 2)
    assert train("seq2seq", "--dry-run") == 0
    write_lines(folder / "causal_lm.jsonl", [{"text": "green blue red " * 40}])
    assert train("causal_lm", "--dry-run") == 2
    assert train("causal_lm", "--dry-run", "--set", "max_length=500") == 0


def test_a_model_that_is_right_only_one_by_one_is_refused_with_the_way_out(folder, capsys, monkeypatch):
    from truebatch.hf.finetune import system
    from truebatch.verification.choose_layout import LayoutChoice

    monkeypatch.setattr(system, "choose_layout", lambda model: LayoutChoice("grouped", {}, {"padded": "a reason"}))
    assert train("causal_lm") == 2
    assert "train.true_batch=off" in capsys.readouterr().err
    assert train("causal_lm", "--set", "train.true_batch=off") == 0


def test_without_peft_lora_says_how_to_get_it(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    assert train("causal_lm", "--lora") == 2
    assert "pip install 'truebatch[peft]'" in capsys.readouterr().err


@pytest.mark.parametrize("task", DATA)
def test_lora_trains_and_saves_the_adapter_only(folder, task):
    peft = pytest.importorskip("peft")
    more = ["--lora", "--set", "train.epochs=8", "--set", "train.learning_rate=1e-2"]
    more += ["--set", "lora_rank=4", "--set", "lora_alpha=4"]
    assert train(task, *more) == 0
    assert losses()[-1] < losses()[0]
    assert not Path("runs/hf/model/model.safetensors").exists()
    kept = load_newest(Path("runs/hf/checkpoints")).checkpoint.parts["model"]
    assert all("lora" in name or "modules_to_save" in name for name in kept), list(kept)
    start = {"seq2seq": "t5", "causal_lm": "llama"}.get(task, "bert")
    if task == "causal_lm":
        whole = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), "runs/hf/model")
        before = AutoModelForCausalLM.from_pretrained(start).state_dict()
        base = whole.get_base_model().state_dict()
        assert torch.equal(base["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
        assert any("lora_B" in name and bool(value.any()) for name, value in base.items())
    assert train(task, *more) == 0


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_sketch_has_the_parameters_of_the_model(kind):
    sizes = {
        "gpt2": ("causal_lm", transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)),
        "t5": ("seq2seq", transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)),
    }
    task, config = sizes[kind]
    real = getattr(transformers, pretrained.CLASSES[task]).from_config(config)
    sketch = pretrained.sketch_model(config, task)
    assert {n: p.shape for n, p in sketch.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
