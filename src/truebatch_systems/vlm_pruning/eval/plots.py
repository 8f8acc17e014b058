"""Pictures of a trained run: the tokens it keeps on each image, layer by layer, and accuracy against the budget.

samples -> masks of every pruning layer -> SVG with dropped patches darkened;   budgets -> curves of all ways to prune
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from xml.sax.saxutils import escape

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from truebatch.batch.collate import collate
from truebatch.errors import ConfigError
from truebatch.planning.rows import padded_rows
from truebatch.reports.artifacts import keep_picture, keep_table
from truebatch.reports.plots import curves
from truebatch.reports.tables import Table
from truebatch.training.system import SizedDataset
from truebatch_systems.vlm_pruning.backbones.llava import GRID
from truebatch_systems.vlm_pruning.config import PruningConfig
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples, Sample, SampleEncoder, encoded_fields
from truebatch_systems.vlm_pruning.data.image_io import open_images
from truebatch_systems.vlm_pruning.eval.evaluate import answer_samples, budget_curve, chosen_samples
from truebatch_systems.vlm_pruning.model.model import Choosing, PrunedVLM

_SIDE, _GAP, _LINE = 168, 12, 16
"""Pixels: of an image's longer side, between images, of a line of text."""
_INK, _DARK = "#7d8590", "#10141a"

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Which vision tokens of one sample are there after each pruning layer."""

    sample: Sample
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of tokens of every image."""
    stages: tuple[tuple[int, Bools], ...]
    """(layer, [tokens of the sample]) in the order of the layers."""


def show(config: PruningConfig, model: nn.Module, dataset: SizedDataset, run: Path) -> list[Path]:
    """Keep the pictures of a run for its report: kept tokens of some samples, and accuracy against the budget."""
    pruned, held = cast(PrunedVLM, model), cast(EncodedSamples, dataset)
    settings = config.evaluation_settings
    _refuse_unseen(pruned, held.encoder)
    samples = chosen_samples(held, settings.eval_max_samples)
    paths = []
    shown = samples[: settings.pictures]
    said = answer_samples(pruned, held.encoder, shown, max_new_tokens=settings.max_new_tokens)
    for number, kept in enumerate(kept_tokens(pruned, held.encoder, shown)):
        paths.append(keep_picture(run, f"50-kept-tokens-{number:02d}", draw_kept(kept, said[number].text)))
    if settings.curve_budgets:
        found = budget_curve(
            pruned, held.encoder, samples, settings.curve_budgets, max_new_tokens=settings.max_new_tokens
        )
        paths += _keep_curve(run, found, len(samples))
    return paths


def _refuse_unseen(model: PrunedVLM, encoder: SampleEncoder) -> None:
    if model.method.stage != "pruning":
        raise ConfigError(
            "this run trained a backbone, nothing is pruned yet",
            seen="method_settings.stage=backbone",
            do="train with stage=pruning and this run's model as backbone_settings.name, then show that run",
        )
    if encoder.merge_ratio is not None or encoder.family.model_type == "llava_next":
        raise ConfigError(
            "vision tokens of this run have no single place on the image",
            seen=f"enable_token_merger={encoder.merge_ratio is not None}, model_type={encoder.family.model_type}",
            do="pictures are drawn for LLaVA-1.5 and Qwen-VL without a merger",
        )


@torch.inference_mode()
def kept_tokens(model: PrunedVLM, encoder: SampleEncoder, samples: Sequence[Sample]) -> Iterator[Kept]:
    """What is left of every sample's vision tokens after each pruning layer, as in use."""
    if not samples:
        return
    encoded = [encoder.encode(sample, with_answer=False) for sample in samples]
    longest = max(len(one["input_ids"]) for one in encoded)
    batch = collate(encoded, padded_rows(np.arange(len(encoded)), longest), encoded_fields(model.family))
    stream = model.look(batch.to(next(model.parameters()).device))
    masks = model.pruned(stream, Choosing(how="hard", temperature=model.method.temperature_min)).used
    so_far = torch.ones(stream.vision.cells.shape, dtype=torch.bool, device=stream.embeds.device)
    stages: list[list[Bools]] = []
    for mask in masks:
        so_far = so_far & (mask > -1)  # masks are logs of 0 or 1 here
        flat = torch.split(stream.vision.axis.take_tokens(so_far), list(stream.vision.axis.lengths))
        stages.append([one.cpu().numpy() for one in flat])
    for at, sample in enumerate(samples):
        found = tuple((layer, one[at]) for layer, one in zip(model.method.pruning_layers, stages, strict=True))
        yield Kept(sample, tuple(_grids(encoded[at], encoder)), found)


def _grids(encoded: Any, encoder: SampleEncoder) -> Iterator[tuple[int, int]]:
    if GRID in encoded:
        yield from ((int(rows), int(columns)) for rows, columns in encoded[GRID])
    else:
        merged = int(encoder.images.config.vision_config.spatial_merge_size)
        yield from ((int(rows) // merged, int(columns) // merged) for _, rows, columns in encoded["image_grid_thw"])


def draw_kept(kept: Kept, said: str = "") -> str:
    """SVG: a line of images for every stage, dropped patches darkened; the question and the answers as text."""
    images = open_images(kept.sample.get("image"), sample=str(kept.sample.get("id", "?")))
    sizes = [_shown_size(image) for image in images]
    width = max(360, _GAP + sum(w + _GAP for w, _ in sizes) * (len(kept.stages) + 1))
    height = max((h for _, h in sizes), default=0)
    parts = [_text(_GAP, _LINE, str(kept.sample.get("question", "")))]
    answer = f"answer: {kept.sample.get('answer')}" + (f"   said: {said}" if said else "")
    parts.append(_text(_GAP, 2 * _LINE, answer))
    top, left = 3 * _LINE, _GAP
    total = sum(rows * columns for rows, columns in kept.grids)
    for layer, is_kept in [(None, np.ones(total, dtype=np.bool_)), *kept.stages]:
        label = "image" if layer is None else f"after layer {layer}: {int(is_kept.sum())} of {total}"
        parts.append(_text(left, top + height + _LINE, label))
        first = 0
        for image, (w, h), (rows, columns) in zip(images, sizes, kept.grids, strict=True):
            parts.append(_image(image, left, top, w, h))
            mine = is_kept[first : first + rows * columns].reshape(rows, columns)
            parts += _covers(mine, left, top, w, h)
            first, left = first + rows * columns, left + w + _GAP
    whole = top + height + 2 * _LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{whole}" viewBox="0 0 {width} {whole}">'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _shown_size(image: Image.Image) -> tuple[int, int]:
    factor = _SIDE / max(image.size)
    return max(1, round(image.width * factor)), max(1, round(image.height * factor))


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="12" fill="{_INK}">{escape(text[:200])}</text>'


def _image(image: Image.Image, x: int, y: int, width: int, height: int) -> str:
    held = io.BytesIO()
    image.resize((width, height), Image.Resampling.NEAREST).save(held, format="PNG")
    data = base64.b64encode(held.getvalue()).decode("ascii")
    return f'<image x="{x}" y="{y}" width="{width}" height="{height}" href="data:image/png;base64,{data}"/>'


def _covers(is_kept: Bools, x: int, y: int, width: int, height: int) -> Iterator[str]:
    rows, columns = is_kept.shape
    w, h = width / columns, height / rows
    for row, column in np.argwhere(~is_kept).tolist():
        place = f'x="{x + column * w:.1f}" y="{y + row * h:.1f}" width="{w:.1f}" height="{h:.1f}"'
        yield f'<rect class="dropped" {place} fill="{_DARK}" opacity="0.8"/>'


def _keep_curve(run: Path, found: dict[str, list[tuple[float, float]]], number: int) -> list[Path]:
    lines = {
        way: ([100 * share for share, _ in points], [100 * accuracy for _, accuracy in points])
        for way, points in found.items()
    }
    svg = curves(
        lines, title=f"Accuracy against budget, {number} samples", x="% of vision tokens in an average layer",
        y="% right",
    )  # fmt: skip
    shares = [f"{100 * share:.1f} %" for share, _ in next(iter(found.values()), [])]
    rows = tuple((way, *(f"{100 * accuracy:.1f}" for _, accuracy in points)) for way, points in found.items())
    table = Table(("way", *shares), rows, "Accuracy (%) by share of vision tokens in an average layer")
    return [keep_picture(run, "40-accuracy-by-budget", svg), keep_table(run, "41-accuracy-by-budget", table)]
