"""Other libraries in the training benchmark, each where it is installed, on the samples of all other ways.

What they do to a process decides their place: TRL and torchtitan bring a collator and a model of their own; Liger's
kernels stay in every model of the process, so its rows come last; Unsloth rewrites transformers itself and gets a process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.training.methods import OWN, Way, hf_packed_step, hf_step
from benchmarks.training.torchtitan import Step, titan_step
from benchmarks.training.workload import Part, Work
from truebatch.batch.microbatch import MicroBatch
from truebatch.planning.rows import Ints

TRL = "TRL padding-free, 8"
TITAN = "torchtitan, packed, compiled"
LIGER = ("Liger, HF default, 8", "Liger, HF packed")
UNSLOTH = ("Unsloth, 8", "Unsloth, packed")
PEERS = {TRL: "trl", TITAN: "torchtitan", **dict.fromkeys(LIGER, "liger_kernel"), **dict.fromkeys(UNSLOTH, "unsloth")}
"""Way -> the module it needs. All are for causal models."""
WAYS = (*OWN, *PEERS)
"""All ways in the order they run in."""


def trl_ways(model: Any, work: Work, *, device: torch.device, backend: str) -> list[Way]:
    """TRL's padding-free collator over 8 samples."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def collate(ids: Ints) -> dict[str, Tensor]:
        found: dict[str, Tensor] = collator([{"input_ids": work.samples[i]["input_ids"].tolist()} for i in ids])
        return found

    def part(ids: Ints) -> Part:
        lengths = work.lengths[ids]
        return Part(lengths=lengths, cells=int(lengths.sum()), make=partial(collate, ids))

    def run(batch: dict[str, Tensor]) -> None:
        given = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        model(**given, use_cache=False).loss.backward()

    groups = [np.arange(i, i + 8) for i in range(0, len(work.lengths) - 7, 8)]
    return [Way(name=TRL, parts=lambda: [part(ids) for ids in groups], run=run, is_other=True)]


def titan_ways(model: Any, work: Work, *, device: torch.device, backend: str) -> list[Way]:
    """torchtitan's own Llama 3 with these weights, on the packed rows that ours has."""
    if model.config.model_type != "llama":
        raise ValueError(f"torchtitan is measured with models of the kind llama, not {model.config.model_type}")
    if device.type != "cuda":
        raise ValueError("the attention of torchtitan has no backward pass on a CPU")
    made: list[Step] = []

    @contextmanager
    def with_model() -> Iterator[None]:
        made.append(titan_step(model, cells=work.cells, backend=backend))
        try:
            yield
        finally:
            made.clear()

    def run(batch: MicroBatch) -> None:
        ids, labels, positions = (
            part.to(device, non_blocking=True) for part in (batch["input_ids"], batch["labels"], batch.positions)
        )
        torch.autograd.backward(made[0](ids, labels, positions) / labels.numel())

    packed = Way(
        name=TITAN, parts=partial(work.packed, is_static=False), run=run, compiled=True, is_other=True,
        around=with_model, held_apart=_bytes_of(model),
    )  # fmt: skip
    return [packed]


def liger_ways(model: Any, work: Work, *, device: torch.device, backend: str) -> list[Way]:
    """Liger's kernels and fused loss in the ways of Hugging Face.

    It puts them into the modules of transformers too, which all models of the process share, and nothing takes them out
    again: whatever else is measured must be measured before.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    apply: Callable[..., None] = _apply_liger_kernel_to_instance

    @contextmanager
    def with_kernels() -> Iterator[None]:
        apply(model=model)
        yield

    known: dict[str, Any] = {"around": with_kernels, "is_other": True}
    theirs, packed = hf_step(model, device), hf_packed_step(model, device)
    return [
        Way(name=LIGER[0], parts=lambda: work.chunks(8, by_length=False), run=theirs, most=6, **known),
        Way(name=LIGER[1], parts=work.flattened, run=packed, most=2, **known),
    ]


def unsloth_ways(model: Any, work: Work, *, device: torch.device, backend: str) -> list[Way]:
    """Unsloth's model with these weights, all of them trained: 8 samples padded, and packed rows with its own lengths.

    It rewrites transformers and TRL for the whole process.
    """
    if device.type != "cuda":
        raise ValueError("Unsloth trains on a GPU alone")
    made: list[Any] = []

    @contextmanager
    def with_model() -> Iterator[None]:
        if not made:  # it stays: reading it takes half a minute, and no other way comes behind
            made.append(_unsloth_model(model, longest=work.cells))
        yield

    def padded(batch: MicroBatch) -> None:
        with torch.autocast(device.type, torch.bfloat16):  # as its trainer does it: norms give fp32
            hf_step(made[0], device)(batch)

    def packed(batch: MicroBatch) -> None:
        lengths = torch.tensor(batch.rows().lengths, dtype=torch.int32)
        with torch.autocast(device.type, torch.bfloat16):
            hf_packed_step(made[0], device, packed_seq_lengths=lengths)(batch)

    known: dict[str, Any] = {"around": with_model, "is_other": True, "held_apart": _bytes_of(model)}
    return [
        Way(name=UNSLOTH[0], parts=lambda: work.chunks(8, by_length=False), run=padded, most=6, **known),
        Way(name=UNSLOTH[1], parts=work.flattened, run=packed, **known),
    ]


def _unsloth_model(model: Any, *, longest: int) -> Any:
    """It reads models from a folder alone, and none without a tokenizer."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from unsloth import FastLanguageModel

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=longest, dtype=model.dtype, load_in_4bit=False, full_finetuning=True,
            use_gradient_checkpointing=False,
        )  # fmt: skip
    return made.train()


def _bytes_of(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


MAKERS: dict[str, Callable[..., list[Way]]] = {
    "trl": trl_ways, "torchtitan": titan_ways, "liger_kernel": liger_ways, "unsloth": unsloth_ways,
}  # fmt: skip
"""Module -> its ways. All are given the device and the compiler, which not all need."""
