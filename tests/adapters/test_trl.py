"""TRL's preference and reinforcement trainers with shared prompts: the loss and gradient of TRL's own step."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.adapters.test_sft import WORDS, tokenizer
from truebatch.adapters.shared_backbone import SharedPrompts, share_prompts
from truebatch.adapters.trl import SharedPromptMixin
from truebatch.errors import ConfigError, MemoryLimitError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.filterwarnings("ignore")]
PROMPT = " ".join(WORDS[i % 26] for i in range(20))
PAIRS = [
    {
        "prompt": f"{PROMPT} {WORDS[i]}",
        "chosen": " ".join(WORDS[(3 * i + k) % 26] for k in range(2 + i)),
        "rejected": " ".join(WORDS[(5 * i + 2 * k) % 26] for k in range(6 - i)),
    }
    for i in range(4)
]


def build(kind="causal_lm", seed=0):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, eos_token_id=2, bos_token_id=2, num_labels=1,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM if kind == "causal_lm" else transformers.LlamaForSequenceClassification
    return made(config)


def experimental(name):
    warnings.simplefilter("ignore")
    if hasattr(trl, f"{name}Trainer"):
        return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    module = pytest.importorskip(f"trl.experimental.{name.lower()}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def trainer(name, folder, *, shared, data=None, cells=None, **settings):
    kind, config = experimental(name)
    given = {
        "output_dir": str(folder), "report_to": [], "use_cpu": True, "per_device_train_batch_size": 4,
        "bf16": False, "seed": 0, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "gradient_checkpointing": False, **settings,
    }  # fmt: skip
    made = type("Shared", (SharedPromptMixin, kind), {}) if shared else kind
    more = {"truebatch": SharedPrompts(cells=cells)} if shared and cells else {}
    if name in ("GRPO", "RLOO"):
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    if name in ("DPO", "KTO"):
        more["ref_model"] = build()
    model = build("reward" if name == "Reward" else "causal_lm")
    rows = datasets.Dataset.from_list(data or PAIRS)
    return made(model=model, args=config(**given), train_dataset=rows, processing_class=tokenizer(), **more)


def away(model):
    """Another model than the reference."""
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=chance)


def loss_and_gradient(made, inputs=None):
    away(made.model)
    made.model.train()
    if inputs is None:
        batch = next(iter(made.get_train_dataloader()))
        inputs = made._prepare_inputs(batch)
    made.current_gradient_accumulation_steps = 1  # set by the trainer's loop
    loss = made.compute_loss(made.model, dict(inputs))
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])


def close(one, other):
    assert abs(one[0] - other[0]) <= 1e-5 * max(1.0, abs(float(other[0])))
    assert (one[1] - other[1]).norm() <= 1e-5 * other[1].norm()


UNPAIRED = [
    {"prompt": p["prompt"], "completion": p["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
    for i, p in enumerate(PAIRS)
]
CASES = {
    "DPO": ({}, None),
    "DPO apo_zero": ({"loss_type": ["apo_zero"]}, None),
    "KTO": ({"loss_type": "apo_zero_unpaired"}, UNPAIRED),
    "ORPO": ({"max_length": 64}, None),
    "CPO": ({"max_length": 64}, None),
    "Reward": ({}, None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cells", [None, 40])
def test_a_step_is_the_one_of_trl(name, cells, tmp_path):
    settings, data = CASES[name]
    wanted = loss_and_gradient(trainer(name.split()[0], tmp_path, shared=False, data=data, **settings))
    ours = trainer(name.split()[0], tmp_path, shared=True, data=data, cells=cells, **settings)
    close(loss_and_gradient(ours), wanted)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
@pytest.mark.parametrize("cells", [None, 40])
def test_a_group_of_answers_is_the_one_of_trl(name, cells, tmp_path):
    given = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    inputs = group()
    wanted = loss_and_gradient(trainer(name, tmp_path, shared=False, **given), inputs)
    close(loss_and_gradient(trainer(name, tmp_path, shared=True, cells=cells, **given), inputs), wanted)


def group():
    """Two prompts of different lengths, four answers each, padded as TRL does it."""
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 29, (n,), generator=chance) for n in (22, 17)]
    answers = [torch.randint(3, 29, (1 + k % 5,), generator=chance) for k in range(8)]
    ids, mask = torch.ones(8, 22, dtype=torch.int64), torch.zeros(8, 22, dtype=torch.int64)
    answer_ids, answer_mask = torch.ones(8, 6, dtype=torch.int64), torch.zeros(8, 6, dtype=torch.int64)
    for row in range(8):
        prompt, answer = prompts[row // 4], answers[row]
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
        answer_ids[row, : len(answer)], answer_mask[row, : len(answer)] = answer, 1
    return {
        "prompt_ids": ids, "prompt_mask": mask, "completion_ids": answer_ids, "completion_mask": answer_mask,
        "advantages": torch.randn(8, generator=chance), "num_items_in_batch": answer_mask.sum(),
        "old_per_token_logps": -3.3 + 0.1 * torch.randn(8, 6, generator=chance),
        "old_logps": -9.0 + 0.1 * torch.randn(8, generator=chance),
    }  # fmt: skip


def test_a_whole_run_generates_and_learns(tmp_path):
    made = trainer(
        "GRPO", tmp_path, shared=True, data=[{"prompt": p["prompt"]} for p in PAIRS], num_generations=2,
        max_completion_length=4, max_steps=2, learning_rate=1e-2,
    )  # fmt: skip
    before = [p.detach().clone() for p in made.model.parameters()]
    made.train()
    assert made.model.base_model.forward.is_checked
    assert any(not torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


def test_cells_are_shared_and_padding_is_none():
    model = build()
    shared = share_prompts(model, SharedPrompts(check_rows=1))
    seen = []
    original = shared.original

    def counting(*args, **named):
        seen.append(named["input_ids"].shape)
        return original(*args, **named)

    shared.original = counting
    inputs = group()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
    assert hidden.shape == (8, 28, 16)
    assert not hidden[mask == 0].any()
    assert max(shape[1] for shape in seen) == 22 + 17 + int(inputs["completion_mask"].sum())


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("DPO", {"loss_type": ["sigmoid", "sft"], "gradient_accumulation_steps": 2}, "mean over tokens"),
        ("DPO", {"loss_type": ["aot"], "gradient_accumulation_steps": 2}, "order of samples"),
        ("KTO", {"gradient_accumulation_steps": 2}, "baseline is a mean"),
        ("ORPO", {"gradient_accumulation_steps": 2, "max_length": 64}, "mean over tokens"),
        ("GRPO", {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "num_generations": 2}, "mean over tokens"),
    ],
)
def test_what_couples_the_samples_of_a_micro_batch_is_refused_by_name(name, settings, named, tmp_path):
    data = UNPAIRED if name == "KTO" else None
    with pytest.raises(ConfigError, match=named):
        trainer(name, tmp_path, shared=True, data=data, **settings)


def test_other_trainers_and_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="passes over the model are known"):
        trainer("SFT", tmp_path, shared=True, data=[{"prompt": "a", "completion": "b"}])
    from truebatch.testing.tiny_hf.model import tiny_model

    with pytest.raises(ConfigError, match="from left to right"):
        share_prompts(tiny_model("bert", "masked_lm"))
    with pytest.raises(ConfigError, match="at least 1"):
        SharedPrompts(cells=0)


def test_learned_positions_begin_at_the_prompt_and_not_at_its_padding(tmp_path):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=2, eos_token_id=2)).eval()
    inputs = group()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    alone = [model(input_ids=row[real.bool()][None]).logits[0] for row, real in zip(ids, mask, strict=True)]
    padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    share_prompts(model)
    found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    def off(rows):
        return max(float((a - b[real.bool()]).norm() / a.norm()) for a, b, real in zip(alone, rows, mask, strict=True))

    assert off(found) < 1e-6
    assert off(padded) > 1e-3  # plain rows count the padding on the left as positions


def short_of_memory(made, cells, times):
    """Backward passes over packed rows of more than `cells` cells run out of memory, `times` times."""
    left = [times]

    def hook(_module, _args, output):
        hidden = output[0]
        if left[0] and hidden.requires_grad and hidden.shape[1] > cells:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    made.model.base_model.layers[1].register_forward_hook(lambda m, a, o: hook(m, a, (o,) if torch.is_tensor(o) else o))
    return left


def gradient_of_training_step(made, batch, *, before=None):
    away(made.model)
    if before is not None:
        for p, grad in zip(made.model.parameters(), before, strict=True):
            p.grad = grad.clone()
    made.current_gradient_accumulation_steps = 1
    made._metrics["train"].clear()
    loss = made.training_step(made.model, batch)
    return loss, torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward"])
def test_a_step_without_memory_is_run_again_in_smaller_rows(name, tmp_path, caplog):
    settings, data = CASES[name]
    one = trainer(name, tmp_path, shared=True, data=data, **settings)
    batch = next(iter(one.get_train_dataloader()))
    wanted = gradient_of_training_step(one, dict(batch))
    other = trainer(name, tmp_path, shared=True, data=data, **settings)
    left = short_of_memory(other, 33, 5)
    found = gradient_of_training_step(other, dict(batch))
    assert left[0] < 5
    close(found, wanted)
    assert "runs again, in rows of at most" in caplog.text
    assert {k: len(v) for k, v in other._metrics["train"].items()} == {
        k: len(v) for k, v in one._metrics["train"].items()
    }


def test_a_gradient_that_was_there_stays_and_is_added_to(tmp_path):
    one = trainer("DPO", tmp_path, shared=True)
    batch = next(iter(one.get_train_dataloader()))
    before = [torch.randn_like(p) for p in one.model.parameters()]
    wanted = gradient_of_training_step(one, dict(batch), before=before)
    other = trainer("DPO", tmp_path, shared=True)
    short_of_memory(other, 40, 3)
    close(gradient_of_training_step(other, dict(batch), before=before), wanted)


def test_a_step_that_cannot_be_cut_says_so(tmp_path):
    made = trainer("DPO", tmp_path, shared=True)
    batch = next(iter(made.get_train_dataloader()))
    short_of_memory(made, 0, 99)
    with pytest.raises(MemoryLimitError, match=r"however small its packed rows[\s\S]*per_device_train_batch_size"):
        made.training_step(made.model, batch)


def test_answers_are_generated_once_however_often_a_step_is_run(tmp_path):
    given = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0, "max_steps": 2}
    made = trainer("GRPO", tmp_path, shared=True, **given)
    calls, original = [], made._generate_and_score_completions
    made._generate_and_score_completions = lambda inputs: calls.append(1) or original(inputs)
    left = short_of_memory(made, 30, 2)
    made.train()
    assert left[0] < 2
    assert len(calls) == 2
