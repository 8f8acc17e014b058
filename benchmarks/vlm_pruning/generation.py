"""Generation with tokens removed beside generation with all of them: the whole, and the prompt alone."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.training.timing import peak_gib, reset_peak_memory, time_once
from benchmarks.vlm_pruning.workload import Work
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch_systems.vlm_pruning.config import EvalMode
from truebatch_systems.vlm_pruning.eval.flops import account_of
from truebatch_systems.vlm_pruning.eval.generate import open_decoder, sample_prompts
from truebatch_systems.vlm_pruning.model.model import PrunedVLM

_NEVER = 10**9
"""A token id that no model gives: every answer has all its tokens."""


def generation_row(
    model: PrunedVLM, work: Work, mode: EvalMode, *, prompts: int, new_tokens: int, device: torch.device
) -> dict[str, Any]:
    """Seconds of the whole and of reading the prompts, and the account of tokens, operations and bytes."""
    asked = sample_prompts(work.encoder, work.samples[:prompts])
    settings = Generation(max_new_tokens=new_tokens, temperature=0.0)
    decoder = open_decoder(model, work.encoder, mode=mode, ends=[_NEVER])

    def generate() -> None:
        collect(generate_tokens(decoder, asked, settings, rows=len(asked)), len(asked))

    generate()
    reset_peak_memory(device)
    whole = statistics.median(time_once(generate, device) for _ in range(3))
    first = statistics.median(time_once(lambda: decoder.start(asked), device) for _ in range(3))
    text = [len(p.ids) - int(p.inputs["is_vision"].sum()) for p in asked]
    account = account_of(decoder.start(asked)[1], model.backbone, text).figures()
    return {
        "prompts": len(asked),
        "new_tokens": new_tokens,
        "samples_per_second": len(asked) / whole,
        "seconds": whole,
        "prefill_seconds": first,
        "seconds_per_new_token": (whole - first) / max(new_tokens - 1, 1),
        "peak_gib": peak_gib(device),
        **account,
    }
