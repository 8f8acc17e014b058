"""The model folders and files that the commands work on: random weights, a tokenizer of words, nothing downloaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from truebatch.testing.toy_images import SHAPES, draw_shape

SPECIAL = ("<unk>", "<s>", "</s>", "<sys>", "<usr>", "<ast>", "Yes", "No")
END = 2
TEMPLATE = (
    "{% for m in messages %}{% if m['role']=='system' %}<sys> {% elif m['role']=='user' %}<usr> {% else %}<ast> {% endif %}"
    "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<ast> {% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSizes:
    """How large models and files are."""

    vocabulary: int
    hidden: int
    layers: int
    samples: int
    """Texts to train on."""
    prompts: int
    pictures: int
    median: int
    """Words of a text; lengths are log-normal."""
    longest: int


TINY = FolderSizes(vocabulary=500, hidden=64, layers=2, samples=200, prompts=48, pictures=6, median=24, longest=100)
MIDDLE = FolderSizes(
    vocabulary=8000, hidden=768, layers=8, samples=3000, prompts=512, pictures=32, median=120, longest=1000
)


def make_folders(work: Path, sizes: FolderSizes) -> None:
    """Write `llama`, `qwen3`, `reward`, `vlm` and the files of samples below `work`."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(sizes.vocabulary)
    head = 16 if sizes.hidden < 256 else 64
    shape: dict[str, Any] = {
        "vocab_size": sizes.vocabulary, "hidden_size": sizes.hidden, "intermediate_size": 3 * sizes.hidden,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.hidden // head,
        "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": END, "pad_token_id": END,
    }  # fmt: skip
    shape["num_key_value_heads"] = shape["num_attention_heads"] // 2
    torch.manual_seed(0)
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=head)),
        "reward": LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1)),
    }
    for name, model in made.items():
        model.to(torch.bfloat16).save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
    _write_vision_folder(work / "vlm")
    _write_samples(work, sizes)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Each word between spaces is a token: w0, w1, and so on."""
    words = {word: at for at, word in enumerate(SPECIAL)}
    words |= {f"w{at}": at + len(SPECIAL) for at in range(vocabulary - len(SPECIAL))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        extra_special_tokens=list(SPECIAL[3:6]),
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _write_vision_folder(folder: Path) -> None:
    """A tiny Qwen3-VL; its processor is written by its parts, for transformers wants torchvision to write a whole one."""
    from truebatch_systems.vl_reward.judge.tiny_judge import tiny_judge

    model, processor = tiny_judge()
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")


def _write_samples(work: Path, sizes: FolderSizes) -> None:
    draw = np.random.default_rng(0)

    def text(longest: int = sizes.longest) -> str:
        length = int(np.clip(draw.lognormal(np.log(sizes.median), 0.9), 4, longest))
        return " ".join(f"w{at}" for at in draw.integers(0, sizes.vocabulary - len(SPECIAL), length))

    _write_lines(work / "texts.jsonl", [{"text": text()} for _ in range(sizes.samples)])
    _write_lines(work / "held_out.jsonl", [{"text": text()} for _ in range(max(16, sizes.samples // 20))])
    system = text(200)
    _write_lines(
        work / "prompts.jsonl", [{"id": str(at), "system": system, "user": text()} for at in range(sizes.prompts)]
    )
    (work / "pictures").mkdir(exist_ok=True)
    for at in range(sizes.pictures):
        picture = Image.new("RGB", (64 + 32 * (at % 3), 64 + 16 * (at % 4)), "white")
        draw_shape(ImageDraw.Draw(picture), SHAPES[at % len(SHAPES)], (8, 8, 56, 56), (200, 30, 30 + at % 200))
        picture.save(work / "pictures" / f"{at}.png")
    asked = [
        {"id": str(at), "prompt": "Is there a circle?", "images": [os.path.join("pictures", f"{at}.png")]}
        for at in range(sizes.pictures)
    ]
    _write_lines(work / "pictures.jsonl", asked)


def _write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
