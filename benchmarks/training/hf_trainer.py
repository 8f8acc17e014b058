"""The Hugging Face Trainer as its users run it, a line for every step: the peer of our command, in a process of its own.

    python -m benchmarks.training.hf_trainer FOLDER --collate padded --log steps.jsonl

FOLDER holds `model/` and `texts.jsonl`, as `benchmarks.training.command_case` writes them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

BATCH = 8


class TokenLog(TrainerCallback):
    """A line with the tokens of each step, when the device has done it."""

    def __init__(self, file: Path) -> None:
        self.file = file.open("w")
        self.tokens = 0

    def on_step_end(self, *_given: Any, **_more: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
        self.file.write(json.dumps({"tokens": self.tokens, "peak_gib": peak}) + "\n")
        self.file.flush()
        self.tokens = 0


def main() -> None:
    """Train; the tokens of a step are counted where its samples are collated."""
    asked = _parser().parse_args()
    is_causal = asked.task == "causal_lm"
    tokenizer = AutoTokenizer.from_pretrained(asked.folder / "model")
    family = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
    on_gpu = torch.cuda.is_available()
    model = family.from_pretrained(asked.folder / "model", dtype=torch.bfloat16 if on_gpu else torch.float32)
    if asked.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    log = TokenLog(asked.log)
    collate = _counting(_collator(asked.collate, tokenizer, is_causal=is_causal), log)
    grouped = {"train_sampling_strategy": "group_by_length"} if asked.collate == "grouped" else {}
    arguments = TrainingArguments(
        str(asked.folder / f"hf-{asked.collate}"), per_device_train_batch_size=BATCH, bf16=on_gpu, use_cpu=not on_gpu,
        gradient_accumulation_steps=asked.samples_per_step // BATCH, max_steps=asked.max_steps, save_strategy="no",
        report_to=[], logging_steps=10_000, remove_unused_columns=False, disable_tqdm=True, **grouped,
    )  # fmt: skip
    samples: Any = _samples(asked.folder / "texts.jsonl", tokenizer, is_causal=is_causal)
    Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collate, callbacks=[log]).train()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--collate", choices=("padded", "grouped", "flattened"), default="padded")
    parser.add_argument("--task", default="causal_lm")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--samples-per-step", type=int, default=256)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--log", type=Path, required=True)
    return parser


def _samples(file: Path, tokenizer: Any, *, is_causal: bool) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = [{"input_ids": tokenizer(record["text"])["input_ids"]} for record in records]
    if is_causal:
        return found
    return [one | {"label": int(record["label"] == "odd")} for one, record in zip(found, records, strict=True)]


def _collator(name: str, tokenizer: Any, *, is_causal: bool) -> Any:
    if name == "flattened":
        return DataCollatorWithFlattening(return_flash_attn_kwargs=False)
    return DataCollatorForLanguageModeling(tokenizer, mlm=False) if is_causal else DataCollatorWithPadding(tokenizer)


def _counting(collate: Any, log: TokenLog) -> Any:
    def counted(samples: list[dict[str, Any]]) -> Any:
        log.tokens += sum(len(sample["input_ids"]) for sample in samples)
        return collate(samples)

    return counted


if __name__ == "__main__":
    main()
