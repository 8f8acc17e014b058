"""Dicts of token ids into one packed row, with the words that packed attention reads.

[{"input_ids": ...}, ...] -> collate_packed -> model(**row) with attn_implementation="truebatch"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from truebatch.batch.segments import cell_positions, packed_segments
from truebatch.errors import BatchError

IGNORE = -100


def collate_packed(
    samples: Sequence[Mapping[str, Any]], *, multiple_of: int = 1, pad_id: int = 0, first_position: int = 0
) -> dict[str, Any]:
    """One row [1, T] for a Hugging Face model: samples end to end, each as if it were alone.

    A sample has `input_ids`; `labels` default to them. The first label of every sample is -100: a causal model predicts
    it from the sample before. More values per token (`token_type_ids`) are packed along, and cells that an
    `attention_mask` of the sample hides are left out. `first_position`: 2 for RoBERTa and its kin.

    >>> from truebatch import collate_packed
    >>> row = collate_packed([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> row["labels"].tolist(), row["position_ids"].tolist(), row["cu_seq_lens_q"].tolist()
    ([[-100, 6, 7, -100, 9]], [[0, 1, 2, 0, 1]], [0, 3, 5])
    """
    parts = [_tokens_of(number, sample) for number, sample in enumerate(samples)]
    if not parts:
        raise BatchError("a packed row needs a sample", seen="no samples", do="give at least one")
    names = set(parts[0])
    for number, part in enumerate(parts):
        if set(part) != names:
            raise BatchError(
                "the samples of one row have different fields",
                seen=f"sample {number} has {sorted(part)}, sample 0 has {sorted(names)}",
                do="give every sample the same fields",
            )
    lengths = [len(part["input_ids"]) for part in parts]
    segments = packed_segments(lengths, cells=-(-sum(lengths) // multiple_of) * multiple_of)
    padding = segments.num_cells - sum(lengths)
    row: dict[str, Any] = {
        name: torch.cat([*(part[name] for part in parts), _filler(name, parts, padding, pad_id)])[None]
        for name in names
    }
    longest = max(segments.lengths)
    return row | {
        "position_ids": cell_positions(segments) + first_position,
        "cu_seq_lens_q": segments.starts,
        "cu_seq_lens_k": segments.starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _filler(name: str, parts: Sequence[Mapping[str, Tensor]], cells: int, pad_id: int) -> Tensor:
    value = {"input_ids": pad_id, "labels": IGNORE}.get(name, 0)
    return torch.full((cells,), value, dtype=parts[0][name].dtype)


def _tokens_of(number: int, sample: Mapping[str, Any]) -> dict[str, Tensor]:
    if "input_ids" not in sample:
        raise BatchError(
            "a sample has no 'input_ids'",
            seen=f"sample {number} with fields {sorted(sample)}",
            do="tokenize first; other data goes through truebatch.collate and Field",
        )
    found = {name: torch.as_tensor(value) for name, value in sample.items()}
    length = len(found["input_ids"])
    for name, value in found.items():
        if value.shape != (length,) or not length:
            raise BatchError(
                f"{name!r} does not have one value for every token",
                seen=f"sample {number}: shape {list(value.shape)}, {length} tokens",
                do="leave it out (with a Trainer: remove_unused_columns), or collate with truebatch.collate and Field",
            )
    mask = found.pop("attention_mask", None)
    if mask is not None:
        found = {name: value[mask.bool()] for name, value in found.items()}
    labels = found.setdefault("labels", found["input_ids"]).clone()
    labels[:1] = IGNORE
    return {**found, "labels": labels}
