"""Pairs of a micro-batch as rows of a model: the prompt once, or a copy for each answer.

input_ids of a sample: prompt, chosen, rejected -> one packed row of trees | packed copies | a padded row for each answer
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.segments import Segments, packed_segments, padded_segments, refined_segments
from truebatch.hf.preference.sharing import Way
from truebatch.hf.preference.tree_rows import CompletionRows

PARTS = "parts"
"""The field with the lengths of prompt, chosen and rejected."""


def parts_of(batch: MicroBatch) -> list[list[int]]:
    """Tokens of prompt, chosen and rejected, of every sample."""
    found: list[list[int]] = batch[PARTS].tolist()
    return found


def longest_path(batch: MicroBatch) -> int:
    """Cells of the longest prompt with its answer."""
    return max((prompt + max(answers) for prompt, *answers in parts_of(batch)), default=0)


def pair_rows(batch: MicroBatch, way: Way) -> list[CompletionRows]:
    """The rows of these pairs: chosen and rejected in turns. Padded pairs that are alone get a row of their own for each
    answer, without padding."""
    parts, starts = parts_of(batch), batch.segments.sample_starts
    if way == "shared":
        return [_shared(batch, parts, starts)]
    paths = [_path(start, part, which) for start, part in zip(starts, parts, strict=True) for which in (0, 1)]
    lengths = [len(path) for path in paths]
    prompts = [part[0] for part in parts for _ in range(2)]
    if way == "copied":
        return [_gathered(batch, paths, prompts, packed_segments(lengths))]
    if batch.num_samples == 1:
        return [_gathered(batch, [path], [prompts[0]], padded_segments([len(path)])) for path in paths]
    return [_gathered(batch, paths, prompts, padded_segments(lengths))]


def pair_segments(batch: MicroBatch) -> Segments:
    """The table of packed rows in which every pair is a tree."""
    parts = [tuple(part) for part in parts_of(batch)]
    return refined_segments(batch.segments, parts, [(-1, 0, 0)] * len(parts))


def _shared(batch: MicroBatch, parts: Sequence[Sequence[int]], starts: Sequence[int]) -> CompletionRows:
    cells: list[int] = []
    targets: list[int] = []
    last: list[int] = []
    for start, (prompt, *answers) in zip(starts, parts, strict=True):
        ends = np.cumsum([start + prompt, *answers]).tolist()
        for begin, end in pairwise(ends):
            cells += [start + prompt - 1, *range(begin, end - 1)]
            targets += range(begin, end)
            last.append(end - 1)
    counts = [answer for _, *answers in parts for answer in answers]
    ids = batch["input_ids"]
    return _rows(ids, pair_segments(batch), counts, cells, targets, last, [p + a for p, *both in parts for a in both])


def _path(start: int, part: Sequence[int], which: int) -> np.ndarray:
    """Cells of a prompt and of one of its answers."""
    prompt, chosen, _ = part
    begin = start + prompt + (chosen if which else 0)
    return np.concatenate([np.arange(start, start + prompt), np.arange(begin, begin + part[1 + which])])


def _gathered(
    batch: MicroBatch, paths: Sequence[np.ndarray], prompts: Sequence[int], segments: Segments
) -> CompletionRows:
    """Rows made of the cells of these paths."""
    source = np.zeros(segments.num_cells, dtype=np.int64)
    cells: list[int] = []
    targets: list[int] = []
    last: list[int] = []
    for path, prompt, start in zip(paths, prompts, segments.sample_starts, strict=True):
        source[start : start + len(path)] = path
        cells += range(start + prompt - 1, start + len(path) - 1)
        targets += range(start + prompt, start + len(path))
        last.append(start + len(path) - 1)
    ids = batch["input_ids"]
    rows = ids.flatten()[torch.from_numpy(source).to(ids.device)].view(segments.shape)
    counts = [len(path) - prompt for path, prompt in zip(paths, prompts, strict=True)]
    return _rows(rows, segments.to(ids.device), counts, cells, targets, last, [len(path) for path in paths])


def _rows(
    ids: Tensor, segments: Segments, counts: Sequence[int], cells: list[int], targets: list[int], last: list[int],
    paths: Sequence[int],
) -> CompletionRows:  # fmt: skip
    read, learned, ends = (torch.tensor(part, dtype=torch.int64).to(ids.device) for part in (cells, targets, last))
    return CompletionRows(
        input_ids=ids, segments=segments, completions=tuple(range(len(counts))), counts=tuple(counts), cells=read,
        labels=ids.flatten()[learned], last=ends, paths=tuple(paths),
    )  # fmt: skip
