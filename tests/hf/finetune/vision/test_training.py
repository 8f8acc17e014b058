"""Training with images: the gradient of a step is that of plain transformers, one sample at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText

from tests.hf.finetune.vision.folders import data, llava_records
from truebatch.batch.collate import collate
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import prepare_task
from truebatch.hf.processors import load_processor
from truebatch.planning.rows import packed_row, padded_rows
from truebatch.testing.tiny_hf.processors import tiny_vlm_folder

WITH_MASKS = ("gemma3", "paligemma")
"""Their masks follow from the images or the prompt."""


def asked(name: str):
    return name if name in ("qwen2_vl", "llava", "paligemma") else pytest.param(name, marks=pytest.mark.slow)


def one_by_one(name: str, folder: Path, model: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a step as the documentation of transformers has it: processor, model, one sample, no rows."""
    processor = load_processor(folder)
    model.zero_grad()
    inputs = [plain_inputs(name, processor, record) for record in llava_records(one_image=name == "paligemma")]
    count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in inputs)
    total = 0.0
    for one in inputs:
        number = int((one["labels"][:, 1:] != -100).sum())
        loss = model(**one).loss * number
        (loss / count).backward()
        total += float(loss.detach())
    return total / count, gradient(model)


def plain_inputs(name: str, processor: Any, record: dict[str, Any]) -> dict[str, Any]:
    names = record.get("image", [])
    files = [names] if isinstance(names, str) else names
    images = [ImageOps.exif_transpose(Image.open(Path("data") / file)).convert("RGB") for file in files]
    question, answer = (turn["value"] for turn in record["conversations"])
    words = question.replace("<image>\n", "")
    if name == "paligemma":
        return dict(processor(text=["<image>" + words], images=[images], suffix=[answer], return_tensors="pt"))
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": words}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    text = processor.tokenizer.apply_chat_template(turns, chat_template=processor.chat_template, tokenize=False)
    more = {"images": [images]} if images else {}
    made = dict(processor(text=[text], **more, return_tensors="pt", add_special_tokens=False))
    if name == "gemma3":  # it asks for the types of all cells while it trains
        made["token_type_ids"] = made.pop(
            "mm_token_type_ids", made.get("token_type_ids", torch.zeros_like(made["input_ids"]))
        )
    begin = processor.tokenizer("[assistant]", add_special_tokens=False)["input_ids"]
    ids = made["input_ids"][0].tolist()
    first = next(at for at in range(len(ids)) if ids[at : at + len(begin)] == begin) + len(begin)
    made["labels"] = made["input_ids"].clone()
    made["labels"][:, :first] = -100
    return made


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


NAMES = (
    "llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma3", "paligemma",
    "idefics3", "smolvlm", "mistral3", "glm4v",
)  # fmt: skip


@pytest.mark.parametrize("name", [asked(name) for name in NAMES])
def test_rows_of_samples_with_images_have_the_gradient_of_plain_transformers(name, tmp_path, monkeypatch):
    if name == "smolvlm":
        pytest.importorskip("num2words")
    if name == "mistral3":
        pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    folder, lines = tiny_vlm_folder(tmp_path / name, name), data(tmp_path / "data", one_image=name == "paligemma")
    task = prepare_task(FinetuneConfig(model=folder, data=lines, task="vlm", tower="trained"))
    plain = AutoModelForImageTextToText.from_pretrained(folder).train()
    expected, true_gradient = one_by_one(name, folder, plain)

    model = task.build_model()
    layout, why = task.commands.choose_layout(model)
    assert layout == "packed" or name in WITH_MASKS, why
    samples = [task.data.samples[i] for i in range(len(task.data.samples))]
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert lengths == task.measured_data().measured.lengths.tolist()
    batches = []
    for ids in (range(3), range(3, len(samples))):
        rows = packed_row(np.array(ids), sum(lengths[i] for i in ids))
        if layout == "padded":
            rows = padded_rows(np.array(ids), max(lengths[i] for i in ids))
        batches.append(collate([samples[i] for i in ids], rows, task.data.fields))
    model.train().zero_grad()
    count = sum(task.objective.counts(batch)["nll"] for batch in batches)
    total = 0.0
    for batch in batches:
        with task.objective.hold(model, batch):
            loss = task.objective.sums(model, batch)["nll"]
            (loss / count).backward()
        total += float(loss.detach())
    assert total / count == pytest.approx(expected, rel=1e-6)
    assert float((gradient(model) - true_gradient).norm() / true_gradient.norm()) < 1e-6
