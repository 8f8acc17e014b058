"""Data with images as a user has it: tiny models with processors, pictures of several sizes, records in both formats."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tests.hf.finetune.folders import write_lines
from truebatch.testing.toy_images import SHAPES, draw_shape

SIZES = [(40, 24), (24, 48), (16, 16), (64, 33)]
"""Width and height."""


def pictures(folder: Path) -> list[Path]:
    """Shapes on a grained ground, in PNG and JPEG, one of them turned by its EXIF."""
    files = []
    for at, (width, height) in enumerate(SIZES):
        grain = np.random.default_rng(at).integers(0, 255, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(grain)
        box = (2, 2, width // 2, 2 + width // 2)
        draw_shape(ImageDraw.Draw(image), SHAPES[at], box, (250, 20 * at, 30))
        exif = Image.Exif()
        if at == 1:
            exif[0x0112] = 6
        files.append(folder / f"{at}.{'jpg' if at == 1 else 'png'}")
        image.save(files[-1], exif=exif)
    return files


def llava_records(number: int = 10, *, one_image: bool = False) -> list[dict[str, Any]]:
    """None, one or two images a sample."""
    out = []
    for at in range(number):
        many = 1 if one_image else (1, 0, 2, 1)[at % 4]
        names = [("0.png", "1.jpg", "2.png", "3.png")[(at + k) % 4] for k in range(many)]
        turns = [
            {"from": "human", "value": "<image>\n" * many + "what is" + " it" * (at % 5)},
            {"from": "gpt", "value": "a" + " red" * (1 + at % 3)},
        ]
        out.append({**({"image": names if many > 1 else names[0]} if names else {}), "conversations": turns})
    return out


def as_openai(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same sample as OpenAI writes it: parts, with a path or a data: URI."""
    names = record.get("image", [])
    names = [names] if isinstance(names, str) else names
    parts: list[dict[str, Any]] = []
    for at, name in enumerate(names):
        content = base64.b64encode((folder / name).read_bytes()).decode()
        urls = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}},
            {"type": "image", "image": name},
        ]
        parts.append(urls[at % 2])
    asked, answer = (turn["value"] for turn in record["conversations"])
    parts.append({"type": "text", "text": asked.replace("<image>\n", "")})
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def data(folder: Path, name: str = "llava.jsonl", **asked: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pictures(folder)
    return write_lines(folder / name, llava_records(**asked))
