"""Run the user's collator on one sample at a time, so that nothing is padded before the rows are planned.

dataset[i] -> collator([sample]) with randomness keyed by the sample -> real cells only -> what the head needs
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.microbatch import CELLS
from truebatch.errors import BatchError, DataError
from truebatch.hf.heads.heads import ModelHead
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.image_fields import real_tiles, tiles_of
from truebatch.planning.keyed_rng import keyed_hash
from truebatch.planning.lengths.measured_values import Measured

Collator = Callable[[list[Any]], Mapping[str, Any]]

MADE_FROM_IMAGES = {"mm_token_type_ids", "token_type_ids", "batch_num_images"}
"""What processors give beside images, and is made from the rows here."""
REAL = "attention_mask"
"""Name under which tokenizers and collators return the tensor that is 1 where a cell is real."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SingleSamples:
    """A dataset with its collator, by sample id. Their randomness depends on (seed, epoch, sample id) only."""

    dataset: Any
    collator: Collator
    head: ModelHead
    config: Any = None
    """Of the model: it says how many tiles an image has."""
    seed: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        made = make_single(self.dataset, self.collator, sample_id, seed=self.seed, epoch=self.epoch)
        found = _fields_of(made, self.head, sample_id)
        if self.head.images is not None:
            found |= _images_of(made, self.head, self.config)
        return self.head.prepare(found)

    def at_epoch(self, epoch: int) -> SingleSamples:
        """The same samples with the randomness of another epoch."""
        return replace(self, epoch=epoch)


def make_single(dataset: Any, collator: Collator, sample_id: int, *, seed: int, epoch: int = 0) -> dict[str, Any]:
    """The collator's output for one sample alone: tensors with a first axis of 1."""
    with _keyed_globals(seed, epoch, sample_id):
        return dict(collator([dataset[sample_id]]))


def measure_samples(dataset: Any) -> Measured:
    """The number of real `input_ids` of every sample, read once."""
    if hasattr(dataset, "select_columns"):  # a table of the datasets library: no need to read the rest
        dataset = dataset.select_columns([name for name in ("input_ids", REAL) if name in dataset.column_names])
    numbers = (_num_tokens(dataset[i], i) for i in range(len(dataset)))
    return Measured(lengths=np.fromiter(numbers, dtype=np.int64, count=len(dataset)), found="len(input_ids)")


def _num_tokens(sample: Any, sample_id: int) -> int:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise DataError(
            f"sample {sample_id} has no input_ids to measure",
            seen=f"fields {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__,
            do="tokenize the dataset first, so that every sample is a mapping with 'input_ids'",
        )
    return int(sum(sample[REAL])) if REAL in sample else len(sample["input_ids"])


@contextmanager
def _keyed_globals(seed: int, epoch: int, sample_id: int) -> Iterator[None]:
    """Context that seeds the global generators, which collators and datasets draw from, with a seed for the sample."""
    key = int(keyed_hash(seed, epoch, "collator", [sample_id])[0]) >> 1
    # The generator itself, because torch.manual_seed would also set that of every device.
    kept = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


def _fields_of(made: Mapping[str, Any], head: ModelHead, sample_id: int) -> dict[str, Any]:
    _refuse_unknown(made, head)
    along = {f.key for f in head.fields if f.axis == CELLS and f.kind == "along"}
    is_real = _real_cells(made, sample_id)
    out = {}
    planned = {f.key for f in head.fields if head.images is None or f.axis == CELLS}
    for name in sorted(planned & set(made)):
        value = torch.as_tensor(made[name])[0]
        if is_real is not None and name in along:
            _refuse_lost_labels(name, value, is_real, sample_id)
            value = value[is_real]
        out[name] = value
    return out


def _images_of(made: Mapping[str, Any], head: ModelHead, config: Any) -> dict[str, Any]:
    """The images of one sample as processors give them, without an axis of samples; empty where it has none."""
    assert head.images is not None
    names = [f.key for f in head.fields if f.axis != CELLS]
    found = {name: torch.as_tensor(made[name]) if name in made else torch.zeros(0) for name in names}
    if head.images.name == "rows":
        return {name: value[0] if value.numel() else value for name, value in found.items()}
    pixels = found["pixel_values"]
    if head.images.name == "tiles" and pixels.ndim == 5:
        numbers = tiles_of(config, found["image_sizes"], made.get("batch_num_images"))
        found["pixel_values"] = real_tiles(pixels, numbers)
    return found


def _refuse_unknown(made: Mapping[str, Any], head: ModelHead) -> None:
    known = {f.key for f in head.fields} | {REAL, "labels"} | (MADE_FROM_IMAGES if head.images is not None else set())
    unknown = sorted((set(made) & head.border.accepts) - known)
    if unknown:
        raise BatchError(
            f"the collator gives {unknown}, which the planned rows would not pass to the model",
            seen=f"fields {sorted(made)} for a {head.kind.name} head, which takes {sorted(f.key for f in head.fields)}",
            do="leave them out of the collator; positions and masks are made from the rows",
        )


def _real_cells(made: Mapping[str, Any], sample_id: int) -> Tensor | None:
    """[T] bool, None where all are real. Real cells must be contiguous: a row cannot have a gap."""
    if REAL not in made:
        return None
    is_real = torch.as_tensor(made[REAL])[0].bool()
    if bool(is_real.all()):
        return None
    at = is_real.nonzero()[:, 0]
    if len(at) == 0 or int(at[-1] - at[0]) + 1 != len(at):
        raise BatchError(
            f"the attention mask of sample {sample_id} has a gap between real cells",
            seen=f"{len(at)} real cells of {len(is_real)}",
            do="mask padding only, on one side or both; set the labels of what should not be learned to -100",
        )
    return is_real


def _refuse_lost_labels(name: str, value: Tensor, is_real: Tensor, sample_id: int) -> None:
    if name == "labels" and bool((value[~is_real] != IGNORE).any()):
        raise BatchError(
            f"sample {sample_id} has labels where its attention mask marks padding",
            seen=f"{int((value[~is_real] != IGNORE).sum())} labels that are not {IGNORE}",
            do=f"set them to {IGNORE}, or leave the padding to the rows",
        )
