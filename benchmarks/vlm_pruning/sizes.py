"""`unified_image_size: auto` against fixed sizes: accuracy and vision tokens on pictures of large and of small shapes.

    python -m benchmarks vlm_pruning --only sizes --out docs/results/vlm_pruning_sizes_cpu.json

A tiny backbone that answers questions about large shapes at the size it was made for goes on learning at every size,
with equally many samples and steps; all are judged on the same test samples. In half of the pictures shapes are small:
they need a large image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import keep_result
from benchmarks.vlm_pruning.quality import QualityConfig, about, make_backbone
from truebatch.training.load_trained import open_trained
from truebatch_systems.vlm_pruning.config import AUTO, MllmSettings
from truebatch_systems.vlm_pruning.data.toy_shapes import MIXED
from truebatch_systems.vlm_pruning.eval.evaluate import evaluate
from truebatch_systems.vlm_pruning.train.pretrain import Lessons, pretrain_tiny

Say = Callable[[str], None]
Size = int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class SizesConfig:
    """What is compared, and how long each backbone learns."""

    sizes: tuple[Size, ...] = (AUTO, 84, 112, 56)
    picked_from: tuple[int, ...] = (56, 112)
    """What `auto` picks from."""
    seed: int = 0
    samples: int = 2400
    epochs: int = 4
    learning_rate: float = 1e-3
    quality: QualityConfig = field(default_factory=QualityConfig)
    """Whose backbone goes on."""
    folder: Path = Path("runs/vlm_pruning_sizes")
    """Runs are kept here; the same command goes on where it was stopped."""


def run_sizes(config: SizesConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Train and judge one backbone for every size; the result is written after each."""
    began = time.monotonic()
    held = {name: value for name, value in asdict(config).items() if name != "quality"}
    result: dict[str, Any] = {"summary": {}, "rows": [], **about(held)}
    for size in config.sizes:
        row = judge_size(config, size, say=say)
        result["rows"].append(row)
        result["summary"] = summary(result["rows"])
        result["seconds"] = time.monotonic() - began
        keep_result(result, out)
        say(f"{size}: {row['accuracy']:.3f} right with {row['vision_tokens']:.1f} vision tokens an image")
    return result


def mllm_of(config: SizesConfig, size: Size) -> MllmSettings:
    """The settings of one size."""
    if isinstance(size, int):
        return MllmSettings(unified_image_size=size)
    return MllmSettings(unified_image_size="auto", image_sizes=config.picked_from)


def judge_size(config: SizesConfig, size: Size, *, say: Say) -> dict[str, Any]:
    """Accuracy and vision tokens of a backbone that learned at this size, by kind of picture."""
    folder = config.folder / str(size)
    lessons = Lessons(
        samples=config.samples, epochs=config.epochs, learning_rate=config.learning_rate, dataset="mixed_shapes",
        mllm=mllm_of(config, size), start=make_backbone(config.quality, config.seed, say=say),
    )  # fmt: skip
    pretrain_tiny(folder, seed=config.seed, lessons=lessons, say=say)
    trained = open_trained(folder / "run")
    dataset: Any = trained.task.test() if trained.task.test else None
    found = evaluate(trained.config, trained.model, dataset, folder)["origin"]
    return {
        "size": str(size),
        "accuracy": found["accuracy"],
        "vision_tokens": found["vision_tokens_mean"],
        "fewest_tokens": found["vision_tokens_min"],
        "most_tokens": found["vision_tokens_max"],
        **{f"accuracy, {kind} shapes": kind_accuracy(found["by_category"], kind) for kind in MIXED},
        "test_samples": found["samples"],
        "interval": found["interval"],
    }


def kind_accuracy(by_category: Mapping[str, float], kind: str) -> float:
    """Of one kind of pictures: its categories have equally many samples."""
    ones = [value for name, value in by_category.items() if name.startswith(kind)]
    return sum(ones) / max(len(ones), 1)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`auto` beside every fixed size: points of accuracy ahead, and the share of its tokens."""
    of = {row["size"]: row for row in rows}
    if AUTO not in of:
        return {}
    mine = of[AUTO]
    found: dict[str, float] = {}
    for size, row in of.items():
        if size != AUTO:
            found[f"points ahead of {size}"] = 100.0 * (mine["accuracy"] - row["accuracy"])
            found[f"tokens / tokens of {size}"] = mine["vision_tokens"] / row["vision_tokens"]
    return found
