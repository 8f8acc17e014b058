"""`truebatch generate`: questions about images from the command line, answered with tokens removed.

"[cat.png] What is it?" -> sample -> prompt -> text as it appears
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from truebatch.errors import DataError
from truebatch.generation.decoding import generate_tokens
from truebatch.generation.settings import Generation
from truebatch.generation.texts import stream_texts
from truebatch.systems.vlm_pruning.backbones import encoder_of
from truebatch.systems.vlm_pruning.generation import open_decoder, sample_prompts

_IMAGE = re.compile(r"\s*\[([^\[\]]+)\]")


def read_question(text: str) -> dict[str, Any]:
    """A sample from images in brackets and the question behind them."""
    images, at = [], 0
    while found := _IMAGE.match(text, at):
        images.append(found[1].strip())
        at = found.end()
    question = text[at:].strip()
    if not images or not question:
        raise DataError(
            "a prompt names its images in brackets, then asks", seen=repr(text[:120]), do="'[cat.png] What is it?'"
        )
    return {"id": text[:40], "image": images, "question": question}


def generate(config: Any, model: Any, prompts: Sequence[str], settings: Generation) -> Iterator[tuple[int, str]]:
    """(number of the prompt, new text) as it appears; a model whose pruners are trained prunes."""
    encoder = encoder_of(config.backbone_settings, config.method_settings)
    asked = sample_prompts(encoder, [read_question(text) for text in prompts], seed=settings.seed)
    mode = "hard" if config.method_settings.stage == "pruning" else "origin"
    decoder = open_decoder(model, encoder, mode=mode)  # type: ignore[arg-type]

    def read(tokens: Sequence[int]) -> str:
        text: str = encoder.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    device = next(model.parameters()).device
    low = torch.bfloat16 if config.train.precision == "bf16" else torch.float16
    with torch.autocast(device.type, low, enabled=config.train.precision != "fp32"):
        yield from stream_texts(generate_tokens(decoder, asked, settings, read=read), read, settings.stop)
