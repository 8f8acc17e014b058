"""Samples taken by category: in turn, or each category in its share.

categories of samples in the order they were drawn, how many -> positions that are taken

The samples of a run: made shapes, a JSONL file, VQAv2, GQA or POPE, in splits that share no image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from truebatch.errors import ConfigError, DataError
from truebatch.io.text_encoding import nearest
from truebatch.planning.keyed_rng import keyed_hash, keyed_order
from truebatch_systems.vlm_pruning.config import Balance, DatasetSettings
from truebatch_systems.vlm_pruning.data.llava_records import read_image_folder, read_llava
from truebatch_systems.vlm_pruning.data.records import (
    SPLITS,
    Placed,
    Sample,
    read_gqa,
    read_jsonl,
    read_pope,
    read_vqav2,
)
from truebatch_systems.vlm_pruning.data.toy_shapes import BLOCK, CATEGORIES, MIXED, MixedShapes, ShapeQuestions, Split


def balanced(categories: Sequence[str], number: int, mode: Balance) -> list[int]:
    """Positions of `number` samples, the first ones of every category; what cannot be shared evenly goes by name."""
    found: dict[str, list[int]] = {}
    for at, category in enumerate(categories):
        found.setdefault(category, []).append(at)
    sizes = {category: len(found[category]) for category in sorted(found)}
    wanted = min(number, len(categories))
    counts = turn_counts(sizes, wanted) if mode == "mean" else share_counts(sizes, wanted)
    return sorted(at for category, count in counts.items() for at in found[category][:count])


def turn_counts(sizes: dict[str, int], number: int) -> dict[str, int]:
    """How many each category gives if they take turns and those that are used up are passed over."""
    counts = dict.fromkeys(sizes, 0)
    left = number
    while left > 0 and (open_ones := [name for name in sizes if counts[name] < sizes[name]]):
        each = max(1, left // len(open_ones))
        for name in open_ones[:left]:
            taken = min(each, sizes[name] - counts[name], left)
            counts[name] += taken
            left -= taken
    return counts


def share_counts(sizes: dict[str, int], number: int) -> dict[str, int]:
    """How many each category gives in proportion; whole numbers by the largest remainder."""
    total = max(sum(sizes.values()), 1)
    counts = {name: number * size // total for name, size in sizes.items()}
    remainders = sorted(sizes, key=lambda name: (-(number * sizes[name] % total), name))
    for name in remainders[: number - sum(counts.values())]:
        counts[name] += 1
    return counts


Samples = Sequence[Mapping[str, Any]]
SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""Of images, where the files have no splits of their own."""
HELD_BACK = {"train": 0.98, "validation": 0.02}
"""Of the images of an official training split, where there is no official validation beside the test."""
_DEFAULT = {"train": 4800, "validation": 192, "test": 480}


def load_split(settings: DatasetSettings, split: Split) -> Samples:
    """The samples of one split; `settings.train` and so on say how many at most."""
    known: dict[str, Callable[[DatasetSettings, Split], Samples]] = {
        "shapes": _shapes, "mixed_shapes": _mixed_shapes, "random": _random, "vqav2": _vqav2, "gqa": _gqa, "pope": _pope,
    }  # fmt: skip
    if settings.name in known:
        return known[settings.name](settings, split)
    if Path(settings.name).suffix.lower() in (".jsonl", ".ndjson"):
        return _jsonl(settings, split)
    place = Path(settings.name) if settings.root is None else settings.root / settings.name
    if place.suffix.lower() == ".json":
        placed = list(read_llava(place, settings.root or place.parent))
        return _take(settings, split, deal_out(placed, split, SHARES, seed=settings.seed))
    if place.is_dir():
        placed, has_splits = read_image_folder(place, split)
        chosen = placed if has_splits else deal_out(placed, split, SHARES, seed=settings.seed)
        return _take(settings, split, chosen)
    raise ConfigError(
        f"there is no dataset of this name{nearest(settings.name, list(known))}",
        seen=f"dataset_settings.name={settings.name!r}",
        do=f"give a .jsonl file, a .json file of LLaVA's, a folder of images, or one of {', '.join(known)}",
    )


def _number(settings: DatasetSettings, split: Split) -> int | None:
    wanted: int | None = getattr(settings, split)
    return wanted


def _shapes(settings: DatasetSettings, split: Split) -> Samples:
    """Whole blocks of images, so that every answer is as frequent as any other, however many are asked for."""
    images = _whole_blocks(settings, split, kinds=1)
    return ShapeQuestions(images=images, split=split, seed=settings.seed)


def _mixed_shapes(settings: DatasetSettings, split: Split) -> Samples:
    """The same with small shapes in half of the pictures."""
    images = _whole_blocks(settings, split, kinds=len(MIXED))
    return MixedShapes(images=images, split=split, seed=settings.seed)


def _whole_blocks(settings: DatasetSettings, split: Split, *, kinds: int) -> int:
    """Images of each kind for as many samples as are asked for."""
    number = _number(settings, split)
    wanted = _DEFAULT[split] if number is None else number
    per_block = BLOCK * len(CATEGORIES) * kinds
    if wanted % per_block:
        raise ConfigError(
            f"made shapes come in blocks of {per_block} samples, so that no answer is more frequent than another",
            seen=f"dataset_settings.{split}={wanted}",
            do=f"set {split} to {per_block * max(1, round(wanted / per_block))}",
        )
    return wanted // len(CATEGORIES) // kinds


def _random(settings: DatasetSettings, split: Split) -> Samples:
    """Noise with questions of several lengths, for trials of speed and memory: nothing can be learned from it."""
    number = _number(settings, split)
    first = SPLITS.index(split) * 10**6
    return [_noise(settings.seed, first + at) for at in range(64 if number is None else number)]


def _noise(seed: int, number: int) -> Sample:
    draw = np.random.default_rng([seed, number])
    words = " ".join(["What is there"] * int(draw.integers(1, 9)))
    pixels = draw.integers(0, 256, size=(56, 56, 3)).astype(np.uint8)
    return {
        "id": f"random-{number}", "image": Image.fromarray(pixels), "image_id": number, "question": f"{words}?",
        "answer": ("yes", "no")[number % 2], "answers": [], "choices": [], "category": None,
    }  # fmt: skip


def _jsonl(settings: DatasetSettings, split: Split) -> Samples:
    """Lines say their split, or none does and images are dealt out by their names."""
    path = Path(settings.name) if settings.root is None else settings.root / settings.name
    placed = list(read_jsonl(path))
    named = [(place, sample) for place, sample in placed if "split" in sample]
    if named and len(named) < len(placed):
        place = next(place for place, sample in placed if "split" not in sample)
        raise DataError(
            f"{place} does not say its split and other lines do",
            seen=f"{len(named)} of {len(placed)} lines have one",
            do="give every line a split, or none",
        )
    if named:
        _check_apart(named)
        return _take(settings, split, [one for one in placed if one[1]["split"] == split])
    return _take(settings, split, deal_out(placed, split, SHARES, seed=settings.seed))


def _vqav2(settings: DatasetSettings, split: Split) -> Samples:
    root = _root(settings)
    if split == "test":
        return _take(settings, split, list(read_vqav2(root, "val")))
    return _take(settings, split, deal_out(read_vqav2(root, "train"), split, HELD_BACK, seed=settings.seed))


def _gqa(settings: DatasetSettings, split: Split) -> Samples:
    """Official splits; where the test files (testdev) are missing, val is the test and validation comes from train."""
    root = _root(settings)
    has_test = any((root / f"{folder}testdev_balanced_questions.json").exists() for folder in ("", "questions/"))
    if split == "test":
        return _take(settings, split, list(read_gqa(root, "testdev" if has_test else "val")))
    if has_test:
        return _take(settings, split, list(read_gqa(root, "train" if split == "train" else "val")))
    return _take(settings, split, deal_out(read_gqa(root, "train"), split, HELD_BACK, seed=settings.seed))


def _pope(settings: DatasetSettings, split: Split) -> Samples:
    return _take(settings, split, deal_out(read_pope(_root(settings)), split, SHARES, seed=settings.seed))


def _root(settings: DatasetSettings) -> Path:
    if settings.root is None:
        raise ConfigError(
            f"{settings.name} needs the folder its files lie in",
            seen="dataset_settings.root is not set",
            do="set dataset_settings.root",
        )
    return settings.root


def deal_out(placed: Iterable[Placed], split: str, shares: Mapping[str, float], *, seed: int) -> list[Placed]:
    """The samples of one split: an image goes where its name and the seed say, with all its questions.

    Neither the order of a file nor its other images move an image to another split.
    """
    edges = np.cumsum([0.0, *shares.values()]) / sum(shares.values())
    at = list(shares).index(split)
    low, high = edges[at], edges[at + 1] if at + 1 < len(shares) else 1.0 + 1e-9
    return [(place, sample) for place, sample in placed if low <= _share(sample["image_id"], seed) < high]


def _share(image_id: Any, seed: int) -> float:
    """A number from 0 to 1 for an image's name."""
    return float(keyed_hash(seed, 0, f"split {image_id}", [0])[0]) / 2.0**64


def _check_apart(placed: Sequence[Placed]) -> None:
    """Refuse an image that is in two splits: what is trained on would be tested on."""
    first: dict[str, tuple[str, str]] = {}
    for place, sample in placed:
        images = sample["image"] if isinstance(sample["image"], list) else [sample["image"]]
        for image in (os.path.normpath(one) for one in images):
            before, split = first.setdefault(image, (place, sample["split"]))
            if split != sample["split"]:
                raise DataError(
                    f"{place} has an image in split {sample['split']!r} that is in {split!r} too",
                    seen=f"{image}, before at {before}",
                    do="keep all questions about an image in one split",
                )


def _take(settings: DatasetSettings, split: Split, placed: list[Placed]) -> Samples:
    """At most as many as asked for, always the same ones, in file order; every image file is there, every id once."""
    number = _number(settings, split)
    if number is not None and number < len(placed):
        drawn = keyed_order(len(placed), settings.seed, 0, f"subset {split}").tolist()
        if settings.category_priority.enable:
            categories = [str(placed[at][1].get("category")) for at in drawn]
            drawn = [drawn[at] for at in balanced(categories, number, settings.category_priority.mode)]
        placed = [placed[at] for at in sorted(drawn[:number])]
    if not placed and number != 0:
        raise DataError(
            f"there are no samples for {split}",
            seen=f"dataset_settings.name={settings.name!r}, root={settings.root}",
            do=f"add images, or give lines the split {split!r}",
        )
    _check_ids(placed)
    _check_images(placed)
    return [sample for _, sample in placed]


def _check_ids(placed: Sequence[Placed]) -> None:
    first: dict[str, str] = {}
    for place, sample in placed:
        if first.setdefault(sample["id"], place) != place:
            raise DataError(
                f"{place} has an id that is there already",
                seen=f"id={sample['id']!r}, first at {first[sample['id']]}",
                do="give every sample an id of its own, or none",
            )


def _check_images(placed: Sequence[Placed]) -> None:
    """Every image file is there; missing ones are counted and the first is named."""
    found: dict[Path, bool] = {}
    missing = []
    for place, sample in placed:
        images = sample["image"] if isinstance(sample["image"], list) else [sample["image"]]
        for image in images:
            if image not in found:
                found[image] = image.is_file()
            if not found[image]:
                missing.append((place, image))
    if missing:
        place, image = missing[0]
        raise DataError(
            f"{place} names an image that is not there",
            seen=f"{image}" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            do="check the paths; they are relative to the file, or to dataset_settings.root",
        )
