"""Tiny models of six heads, trainers for them, and the gradient of a step taken one sample at a time, the obvious way."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from truebatch.adapters.trainer import TruebatchMixin
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

HEADS = {
    "causal_lm": ("llama", "causal_lm"),
    "token_classification": ("bert", "token_classification"),
    "sequence_classification": ("bert", "sequence_classification"),
    "masked_lm": ("bert", "masked_lm"),
    "t5": ("t5", "seq2seq"),
    "bart": ("bart", "seq2seq"),
}
LENGTHS = [5, 9, 3, 14, 7, 6, 11, 4, 8, 5, 13, 2, 10]

gc.freeze()  # every trainer collects garbage first: what was imported until now need not be looked through each time


class PlannedTrainer(TruebatchMixin, Trainer):
    """The whole of what a user writes."""


class Gradients(TrainerCallback):
    """Keeps the gradient of every update as one vector, before the update."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found.append(gradient_of(model))


def gradient_of(model):
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().flatten().double() for part in parts])


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def arguments(folder, **given):
    settings = {
        "output_dir": str(folder),
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(settings | given))


def build(case):
    """A model and samples without what the head makes itself."""
    model = tiny_model(*HEADS[case])
    if case == "t5":
        model.config.decoder_start_token_id = 0  # as every published T5 has it
    samples = make_samples(model, LENGTHS)
    return model, [{k: v for k, v in s.items() if k != "decoder_input_ids"} for s in samples]


def trainer_of(folder, model, samples, *, kind=PlannedTrainer, truebatch=None, callbacks=(), rate=0.0, **given):
    """A trainer that moves nothing unless a rate is given."""
    extra = {} if truebatch is None else {"truebatch": truebatch}
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    return kind(
        model=model,
        args=arguments(folder, **given),
        train_dataset=samples,
        optimizers=(optimiser, None),
        callbacks=list(callbacks),
        **extra,
    )


def gradients(folder, case, **given):
    """The gradient of every update of a short run, and the samples of each."""
    model, samples = build(case)
    kept = Gradients()
    trainer = trainer_of(folder, model, samples, callbacks=[kept], **given)
    trainer.train()
    plan = trainer._planned.plan(0)
    return kept.found, [plan.step_sample_ids(k).tolist() for k in range(plan.num_steps)], trainer


def sum_and_count(case, model, sample):
    """The loss of one sample, called with nothing but what a tokenizer gives."""
    ids, labels = sample["input_ids"][None], torch.as_tensor(sample["labels"])[None]
    seq2seq = {"labels": labels} if case in ("t5", "bart") else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **seq2seq).logits
    if case == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, int((labels != -100).sum())


def one_by_one(case, model, samples):
    """(gradient, loss) of these samples as one step."""
    model.zero_grad()
    pairs = [sum_and_count(case, model, sample) for sample in samples]
    loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    loss.backward()
    return gradient_of(model), loss.item()
