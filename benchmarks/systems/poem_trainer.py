"""A GPT-2 of transformers on the poems of `chinese_poems`, by the Hugging Face Trainer: its row of that table.

    python -m benchmarks.systems.poem_trainer '{"seconds": 600, "rate": 0.002, "rows": 16, "dropout": 0.0, "grouped": true}'

The same vocabulary, poems, sizes, samples of a step, rate and schedule; rows are padded, of like lengths where `grouped`, of
any otherwise. A few steps are timed first, and as many are run as fit into the CPU seconds that are given.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.real.poems import write_poems
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.prepare import prepare
from truebatch_systems.chinese_gpt.model.export import gpt2_config
from truebatch_systems.chinese_gpt.model.model import ChineseGPT
from truebatch_systems.chinese_gpt.system import shape_of
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import PAD

WARM, TIMED = 4, 16
"""Steps before the clock runs, and steps under it."""
WIDTH = 64
"""Rows of one forward pass of the evaluation."""


class Clock(TrainerCallback):  # type: ignore[misc]
    """CPU seconds of a step, without the first ones."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Keep the time."""
        self.at.append(time.process_time())

    def seconds_per_step(self) -> float:
        """The mean of the timed steps."""
        return (self.at[-1] - self.at[WARM - 1]) / (len(self.at) - WARM)


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest."""
    width = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.full((len(samples), width), PAD)
    labels, real = torch.full((len(samples), width), -100), torch.zeros(len(samples), width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        number = len(sample["input_ids"])
        ids[row, :number] = torch.as_tensor(sample["input_ids"])
        labels[row, :number] = torch.as_tensor(sample["input_ids"])
        real[row, :number] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": real}


def train_for(asked: dict[str, Any], samples: list[dict[str, Any]], model: GPT2LMHeadModel, steps: int) -> Clock:
    """Run the Trainer for some steps; it shifts the labels itself."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=asked["rows"], learning_rate=asked["rate"],
            lr_scheduler_type="cosine", warmup_steps=min(50, steps), weight_decay=0.01, max_grad_norm=1.0, use_cpu=True,
            seed=0, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            **(_grouped() if asked["grouped"] else {}),
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=samples, data_collator=collate, callbacks=[clock])
        trainer.train()
    return clock


def _grouped() -> dict[str, Any]:
    """Rows of like lengths together, as this version of transformers calls it."""
    names = TrainingArguments.__dataclass_fields__
    return (
        {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" in names
        else {"group_by_length": True}
    )


@torch.no_grad()
def perplexity(model: GPT2LMHeadModel, samples: list[dict[str, Any]]) -> float:
    """exp of the mean loss over all tokens but the first."""
    model.eval()
    total, number = 0.0, 0
    ordered = sorted(samples, key=lambda sample: len(sample["input_ids"]))
    for at in range(0, len(ordered), WIDTH):
        batch = collate(ordered[at : at + WIDTH])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        total += float(functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        number += int((labels != -100).sum())
    return math.exp(total / number)


def run_trainer(asked: dict[str, Any]) -> dict[str, Any]:
    """Its row of the table."""
    torch.set_num_threads(1)
    config = ChineseGPTConfig(
        data=str(write_poems()), backend="character", stage="pretraining", dropout=asked["dropout"]
    )
    ready = prepare(config)
    assert ready.test is not None
    model = _new_model(config, ready)
    whole = {
        name: [{"input_ids": [*ids.tolist(), int(part.labels[i][-1])]} for i, ids in enumerate(part.input_ids)]
        for name, part in (("train", ready.train), ("test", ready.test))
    }
    torch.manual_seed(0)
    per_step = train_for(asked, whole["train"], _new_model(config, ready), WARM + TIMED).seconds_per_step()
    steps = max(int(asked["seconds"] / per_step), 1)
    began = time.process_time()
    train_for(asked, whole["train"], model, steps)
    took = time.process_time() - began
    return {
        "way": f"GPT-2 of transformers, Trainer, {'grouped by length' if asked['grouped'] else 'in random order'}",
        "perplexity": perplexity(model, whole["test"]),
        "steps": steps,
        "cpu_seconds": took,
    }


def _new_model(config: ChineseGPTConfig, ready: Any) -> GPT2LMHeadModel:
    """Of the same sizes, with the first weights that transformers gives it."""
    shape = shape_of(config, len(ready.vocab))
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**gpt2_config(ChineseGPT(shape, vocab=ready.vocab))))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_trainer(json.loads(sys.argv[1]))) + "\n")
