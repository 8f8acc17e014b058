"""`train hf --task dpo | reward`: pairs, any cut, one gradient; the slow reference runs each answer alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from tests.hf.finetune.folders import model_folder, tokenizer, write_lines
from truebatch.batch.collate import collate
from truebatch.cli.app import run
from truebatch.errors import ConfigError, DataError
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.preference.config import PreferenceConfig
from truebatch.hf.finetune.preference.evaluate import FIELDS
from truebatch.hf.finetune.preference.objective import ReferenceModel
from truebatch.hf.finetune.preference.read_pairs import encode_pair
from truebatch.hf.finetune.preference.system import prepare_preference
from truebatch.io.atomic_files import read_json
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.testing.failpoints import armed
from truebatch.training.config import TrainConfig
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import StepEngine, accumulate, step_counts

PAIRS = [
    {
        "prompt": "what is the colour of the " + "grass " * (1 + i % 5),
        "chosen": "green " * (1 + i % 3),
        "rejected": "blue " * (1 + i % 4) + "red",
    }
    for i in range(10)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path / "pairs.jsonl", PAIRS)
    model_folder(tmp_path / "llama")
    return tmp_path


def settings(task="dpo", **more):
    train = more.pop("train", TrainConfig())
    return FinetuneConfig(
        model=Path("llama"), data=Path("pairs.jsonl"), task=task, preference=PreferenceConfig(**more), train=train
    )


def moved(model):
    """Away from the reference, so that the loss is not the same for every pair."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=chance)
    return model.train()


def gradient_of_step(task, model, plan_config, ranks=1):
    """The gradient and the loss of one step, cut as planned; those of several ranks added up."""
    data = task.measured_data()
    plan = build_plan(data.measured.lengths, plan_config, ranks=ranks)
    cut = [rows for part in plan.step(0) for rows in part if rows.num_samples]
    batches = [collate([data.samples[int(i)] for i in rows.ids], rows, FIELDS) for rows in cut]
    group = Group(optimiser=torch.optim.SGD(model.parameters()))
    engine = StepEngine(model=model, objective=task.objective, groups=(group,), guard=OomGuard(fields=FIELDS))
    counts = step_counts(batches, task.objective, {}, device=torch.device("cpu"))
    model.zero_grad()
    sums = accumulate(engine, batches, counts, epoch=0)
    loss = sum(value / counts[name] for name, value in sums.items())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), loss


def alone(model, reference, rule):
    """Slow and obvious: every answer after its prompt through the plain models, one at a time."""
    made, losses = tokenizer(), []
    model.zero_grad()
    for place, sample in enumerate(PAIRS):
        pair = encode_pair(made, sample, f"{place}")
        values = []
        for one in (model, reference):
            for answer in (pair.chosen, pair.rejected):
                ids = torch.tensor([[*pair.prompt, *answer]])
                log_p = one(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)[len(pair.prompt) - 1 : -1]
                values.append(log_p.gather(1, torch.tensor(answer)[:, None]).sum())
        losses.append(rule(*values, len(pair.chosen), len(pair.rejected)))
    loss = torch.stack(losses).sum() / len(losses)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), loss.detach()


def off(one, other):
    return ((one - other).norm() / other.norm()).item()


RULES = {
    "sigmoid": lambda c, r, rc, rr, nc, nr: -logsigmoid(0.5 * (c - rc.detach() - r + rr.detach())),
    "ipo": lambda c, r, rc, rr, nc, nr: ((c - rc.detach()) / nc - (r - rr.detach()) / nr - 1).square(),
    "simpo": lambda c, r, rc, rr, nc, nr: -logsigmoid(0.5 * (c / nc - r / nr) - 0.5),
    "apo_zero": lambda c, r, rc, rr, nc, nr: (
        1 - (0.5 * (c - rc.detach())).sigmoid() + (0.5 * (r - rr.detach())).sigmoid()
    ),
}
CUTS = {
    "packed": PlanConfig(layout="packed", samples_per_step=10),
    "packed, in small rows": PlanConfig(layout="packed", samples_per_step=10, cells=64),
    "padded": PlanConfig(layout="padded", samples_per_step=10, samples=3),
    "one by one": PlanConfig(layout="padded", samples_per_step=10, samples=1),
}


@pytest.mark.parametrize("loss_type", RULES)
def test_every_cut_has_the_gradient_of_answers_alone(folder, loss_type):
    reference = AutoModelForCausalLM.from_pretrained("llama").eval()
    wanted, loss = alone(moved(prepare_preference(settings()).build_model()), reference, RULES[loss_type])
    for share in (True, False):
        task = prepare_preference(settings(loss_type=loss_type, beta=0.5, share_prompts=share))
        for name, cut in CUTS.items():
            found, own = gradient_of_step(task, moved(task.build_model()), cut)
            assert off(found, wanted) < 1e-6, (name, share)
            assert abs(own - loss) < 1e-5, (name, share)


def test_memory_that_runs_out_changes_no_gradient(folder):
    task = prepare_preference(settings(beta=0.5))
    wanted, _ = gradient_of_step(task, moved(task.build_model()), CUTS["packed"])
    with armed("step.backward:oom"):
        found, _ = gradient_of_step(task, moved(task.build_model()), CUTS["packed"])
    assert off(found, wanted) < 1e-6


def test_two_ranks_add_up_to_one(folder):
    task = prepare_preference(settings(beta=0.5, loss_type="cpo"))
    wanted, _ = gradient_of_step(task, moved(task.build_model()), CUTS["packed"])
    found, _ = gradient_of_step(task, moved(task.build_model()), CUTS["packed"], ranks=2)
    assert off(found, wanted) < 1e-6


def test_an_adapter_is_compared_with_the_model_without_it(folder):
    pytest.importorskip("peft")
    task = prepare_preference(replace(settings(beta=0.5), lora=True, lora_rank=2))
    gradients = []
    for cut in (CUTS["packed"], CUTS["one by one"]):
        model = task.build_model().double()  # the two answers nearly cancel, which magnifies the rounding of fp32
        chance = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora" in name:
                    weight.copy_(0.3 * torch.randn(weight.shape, generator=chance))
        gradients.append(gradient_of_step(task, model, cut)[0])
    assert off(*gradients) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_rewards_have_one_gradient(folder, kind):
    model_folder(Path(kind), kind)
    task = prepare_preference(replace(settings("reward", center_rewards=0.1), model=Path(kind)))
    # New heads say nearly the same of both answers, and what cancels magnifies the rounding of fp32.
    gradients = [gradient_of_step(task, task.build_model().double(), cut)[0] for cut in CUTS.values()]
    for one in gradients[:-1]:
        assert off(one, gradients[-1]) < 1e-6


def test_checkpointed_layers_find_their_rows_again(folder):
    task = prepare_preference(settings(beta=0.5))
    wanted, _ = gradient_of_step(task, moved(task.build_model()), CUTS["packed"])
    model = moved(task.build_model())
    model.gradient_checkpointing_enable()
    assert off(gradient_of_step(task, model, CUTS["packed"])[0], wanted) < 1e-6


def test_a_prompt_is_planned_once(folder):
    task = prepare_preference(settings())
    measured = task.measured_data().measured
    parts = np.array([task.data.samples[i]["parts"] for i in range(len(PAIRS))])
    assert measured.lengths.tolist() == parts.sum(1).tolist()


CHAT = {
    "prompt": [{"role": "user", "content": "hello"}],
    "chosen": [{"role": "assistant", "content": "green"}],
    "rejected": [{"role": "assistant", "content": "blue and red"}],
}


def test_every_format_says_the_same_pair():
    made = tokenizer()
    implicit = {"chosen": CHAT["prompt"] + CHAT["chosen"], "rejected": CHAT["prompt"] + CHAT["rejected"]}
    found = encode_pair(made, CHAT, "here")
    assert found == encode_pair(made, implicit, "here") == encode_pair(made, {**CHAT, "prompt": "hello"}, "here")
    assert made.decode(found.prompt) == "<|user|>hello<|end|><|assistant|>"
    assert made.decode(found.rejected) == "blue and red<|end|>"
    texts = encode_pair(made, {"prompt": "hello", "chosen": " green", "rejected": " blue"}, "here")
    assert made.decode(texts.prompt) == "<bos>hello"
    assert made.decode(texts.chosen) == " green<eos>"
    common = encode_pair(made, {"chosen": "hello green", "rejected": "hello blue"}, "here")
    assert made.decode(common.prompt).startswith("<bos>hello")
    assert common.chosen != common.rejected


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "KTO"),
        ({"prompt": "a", "chosen": "b"}, "no pair of answers"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, "all three of one kind"),
        ({**CHAT, "chosen": CHAT["prompt"] + CHAT["chosen"]}, "not one answer to a prompt"),
        ("a text", "no pair of answers"),
    ],
)
def test_lines_that_are_no_pairs_are_refused(sample, named):
    with pytest.raises(DataError, match=named):
        encode_pair(tokenizer(), sample, "file:1")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"loss_type": "kto"}, "no sum over pairs"),
        ({"loss_type": "sigmod"}, "did you mean 'sigmoid'"),
        ({"loss_type": "exo_pair"}, "label smoothing"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "half of the pairs"),
        ({"beta": 0.0}, "beta must be above 0"),
    ],
)
def test_losses_that_cannot_be_are_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=named):
        PreferenceConfig(**given)


def trained(*more: str) -> int:
    given = ["train", "hf", "--model", "llama", "--data", "pairs.jsonl", "--set", "train.samples_per_step=5"]
    return run([*given, "--set", "train.check_samples=3", *more])


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_a_run_learns_checks_itself_and_is_evaluated(folder, task, capsys):
    more = ["--set", "train.epochs=4", "--set", "train.learning_rate=5e-3", "--set", "validation=pairs.jsonl"]
    assert trained("--task", task, *more) == 0
    out = capsys.readouterr().out
    assert "a prompt is laid out once" in out
    assert "equality: checked on" in out
    losses = [r["loss"] for r in read_metrics(Path("runs/hf/metrics.jsonl")) if "loss" in r]
    assert losses[-1] < losses[0]
    assert run(["evaluate", "runs/hf"]) == 0
    lines = Path("runs/hf/evaluation/predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["sample"] for line in lines] == list(range(len(PAIRS)))
    assert read_json(Path("runs/hf/model/config.json"))["attention_dropout"] == 0.1


def test_a_stream_of_pairs_and_settings_of_the_other_task_are_refused(folder, capsys):
    assert trained("--task", "dpo", "--set", "streaming=true", "--set", "train.max_steps=1") == 2
    assert trained("--task", "reward", "--set", "preference.beta=0.2") == 2
    assert trained("--task", "dpo", "--set", "preference.center_rewards=0.2") == 2
    said = capsys.readouterr().err
    for words in ("not read as a stream", "settings of dpo would be ignored", "is for a model of rewards"):
        assert words in said


def losses_of(name):
    return [r["loss"] for r in read_metrics(Path(f"runs/{name}/metrics.jsonl")) if "loss" in r]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "reward"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes_end_with_the_loss_of_one(folder, task, ranks):
    assert trained("--task", task, "--out", "runs/one") == 0
    assert trained("--task", task, "--out", "runs/more", "--devices", str(ranks)) == 0
    assert losses_of("one") == pytest.approx(losses_of("more"), abs=1e-6)


EARLY = ("--task", "dpo", "--set", "preference.precompute_reference=true", "--set", "train.learning_rate=5e-3")
LIVE = ("--task", "dpo", "--set", "train.learning_rate=5e-3")


@pytest.mark.parametrize("more", [(), ("--lora",)])
def test_a_reference_that_is_asked_before_training_says_the_same(folder, more, monkeypatch):
    if more:
        pytest.importorskip("peft")
    given = (*more, "--set", "train.epochs=2", "--set", "validation=pairs.jsonl")
    assert trained(*LIVE, *given, "--out", "runs/live") == 0
    monkeypatch.setattr(ReferenceModel, "prepare", lambda self: pytest.fail("a second model was loaded"))
    assert trained(*EARLY, *given, "--out", "runs/early") == 0
    assert losses_of("early") == pytest.approx(losses_of("live"), rel=1e-6)
    live, early = (
        [r["validation"] for r in read_metrics(Path(f"runs/{name}/metrics.jsonl")) if "validation" in r]
        for name in ("live", "early")
    )
    assert early == pytest.approx(live, rel=1e-6)


def test_what_the_reference_said_is_kept_and_belongs_to_its_weights(folder, monkeypatch, capsys):
    assert trained(*EARLY, "--set", "train.epochs=2", "--out", "runs/whole") == 0
    assert trained(*EARLY, "--set", "train.epochs=1", "--out", "runs/parts") == 0
    asked = []
    monkeypatch.setattr("truebatch.hf.finetune.preference.known_reference._ask", lambda *given: asked.append(given))
    assert trained(*EARLY, "--set", "train.epochs=2", "--out", "runs/parts") == 0
    assert asked == []
    assert losses_of("parts") == losses_of("whole")
    model = AutoModelForCausalLM.from_pretrained("llama")
    moved(model).save_pretrained("llama")
    assert trained(*EARLY, "--set", "train.epochs=3", "--out", "runs/parts") == 2
    assert "another model than in" in capsys.readouterr().err


def test_before_it_is_asked_the_reference_is_the_model_of_the_folder(folder):
    task = prepare_preference(settings(beta=0.5))
    wanted, loss = gradient_of_step(task, moved(task.build_model()), CUTS["packed"])
    task = prepare_preference(settings(beta=0.5, precompute_reference=True))
    found, own = gradient_of_step(task, moved(task.build_model()), CUTS["packed"])
    assert off(found, wanted) < 1e-6
    assert abs(own - loss) < 1e-6


@pytest.mark.parametrize(
    "more",
    [
        ("--task", "dpo", "--set", "preference.loss_type=simpo"),
        ("--task", "reward"),
        ("--task", "dpo", "--devices", "2", "--shard"),
    ],
)
def test_a_reference_cannot_always_be_asked_before(folder, more):
    assert trained(*more, "--set", "preference.precompute_reference=true") == 2


@pytest.mark.slow
def test_bits_of_pairs_are_those_of_any_number_of_processes(folder):
    bits = ("--set", "train.exactness=bits", "--set", "train.digest_every=1")
    for name, more in {"one": (), "three": ("--devices", "3", "--set", "train.cells=256")}.items():
        assert trained(*EARLY, *bits, *more, "--out", f"runs/{name}") == 0
    assert run(["diff", "runs/one", "runs/three"]) == 0
