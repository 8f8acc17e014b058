"""Small experiments on a model: does a neighbour move a sample, does a later token move an earlier one?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from truebatch.errors import AttentionError
from truebatch.proof.arrangements import Arrangement, Piece
from truebatch.proof.comparing import relative, scale_of
from truebatch.proof.outputs import PerSample
from truebatch.proof.subjects import Subject, as_array, is_marker
from truebatch.tensors.causal import guard_decoder_layers
from truebatch.tensors.field import Field
from truebatch.tensors.microbatch import MicroBatch, RowAxis

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leak:
    """Changing one sample moved another."""

    arrangement: str
    changed: int
    moved: int
    value: float


@dataclass(frozen=True, slots=True)
class LeakTest:
    """What came of changing samples and watching the others."""

    leaks: tuple[Leak, ...]
    own_move: float
    """How far a changed sample itself moved: what a leak would look like. 0 makes the test empty."""


def find_leaks(subject: Subject, arrangement: Arrangement, limit: float, *, few: bool = False) -> LeakTest:
    """Change sample j; sample i must not move. Tried for a first, a middle and a last neighbour, or for the middle one."""
    leaks: list[Leak] = []
    own = 0.0
    for piece in arrangement.pieces:
        ids = [int(i) for i in piece.rows.ids]
        before = _outputs(subject, piece, subject.samples)
        for at in [len(ids) // 2] if few else sorted({0, len(ids) // 2, len(ids) - 1}):
            changed = _with_changed(subject, ids[at])
            moves = _moves(before, _outputs(subject, piece, changed))
            own = max(own, moves[at])
            leaks += [
                Leak(arrangement.name, ids[at], ids[k], move)
                for k, move in enumerate(moves)
                if k != at and not move <= limit
            ]
    return LeakTest(tuple(leaks), own)


def _outputs(subject: Subject, piece: Piece, samples: Sequence[Sample]) -> PerSample:
    with torch.no_grad():
        return subject.run(piece, samples).outputs


def _moves(before: PerSample, after: PerSample) -> list[float]:
    number = len(next(iter(before.values()), []))
    scales = {name: scale_of(parts) for name, parts in before.items()}
    return [max(relative(after[n][k], before[n][k], scales[n]) for n in before) for k in range(number)]


def _with_changed(subject: Subject, sample: int) -> list[Sample]:
    samples = list(subject.samples)
    samples[sample] = changed_sample(subject, samples[sample])
    return samples


def changed_sample(subject: Subject, sample: Sample) -> Sample:
    """Another sample of the same shape: other whole numbers of those that may stand anywhere, other real numbers.

    Whole numbers that lie flat (the sizes of images) say how the rest is to be read, and stay.
    """
    new = dict(sample)
    shapes = {f.key for f in subject.fields if f.kind == "flat" and as_array(sample[f.key]).dtype.kind != "f"}
    for f in subject.fields:
        if f.kind == "once" or f.shift or f.key in shapes or is_marker(f, subject.samples):
            continue
        known = _known_values(subject, f)
        value = sample[f.key]
        new[f.key] = [_other(v, known) for v in value] if f.kind == "nested" else _other(value, known)
    return new


def _known_values(subject: Subject, field: Field) -> NDArray[Any]:
    if field.name in subject.plain_values:
        return np.unique(np.asarray(subject.plain_values[field.name]))
    values = [v for s in subject.samples for v in (s[field.key] if field.kind == "nested" else [s[field.key]])]
    return np.unique(np.concatenate([as_array(v).reshape(-1) for v in values]))


def _other(value: Any, known: NDArray[Any]) -> NDArray[Any]:
    """Real numbers turned about; every known whole number replaced by the one half-way round; others kept."""
    array = as_array(value)
    if array.dtype.kind == "f":
        return (0.5 - array).astype(array.dtype)
    at = np.minimum(np.searchsorted(known, array), len(known) - 1)
    return np.where(known[at] == array, known[(at + max(len(known) // 2, 1)) % len(known)], array).astype(array.dtype)


def sees_later_tokens(subject: Subject, piece: Piece, limit: float) -> float:
    """How far earlier cells of a sample alone move when its last token changes; 0 where that cannot be asked."""
    sample = int(piece.rows.ids[0])
    before = _outputs(subject, piece, subject.samples)
    length = subject.lengths[sample]
    samples = list(subject.samples)
    samples[sample] = _with_other_last(subject, samples[sample])
    after = _outputs(subject, piece, samples)
    parts = [(before[n][0], after[n][0]) for n in before if before[n][0].shape[:1] == (length,)]
    moved = [relative(b[:-1], a[:-1], scale_of([a])) for a, b in parts if length > 1]
    return max((m for m in moved if not m <= limit), default=0.0)


def _with_other_last(subject: Subject, sample: Sample) -> Sample:
    changed, new = changed_sample(subject, sample), dict(sample)
    for f in subject.fields:
        if f.kind == "along" and not f.shift and not is_marker(f, subject.samples):
            new[f.key] = np.concatenate([as_array(sample[f.key])[:-1], as_array(changed[f.key])[-1:]])
    return new


def is_right_when_flipped(subject: Subject, alone: Arrangement, piece: Piece, limit: float) -> bool:
    """True if the model agrees with itself once True and False of its masks are exchanged: wrong polarity."""
    with torch.no_grad():
        batch = _flipped(subject.micro_batch(piece), subject)
        together = subject.call(subject.model, batch).outputs
        singles = [subject.call(subject.model, _flipped(subject.micro_batch(p), subject)).outputs for p in alone.pieces]
    if not together:
        return False
    moves = [
        relative(together[n][k], singles[i][n][0], scale_of([singles[i][n][0]]))
        for n in together
        for k, i in enumerate(batch.sample_ids)
    ]
    return all(move <= limit for move in moves)


def _flipped(batch: MicroBatch, subject: Subject) -> MicroBatch:
    axes = {
        name: replace(axis, segments=replace(axis.segments, is_real=~axis.segments.is_real))
        if isinstance(axis, RowAxis)
        else axis
        for name, axis in batch.axes.items()
    }
    masks = {f.name for f in subject.fields if f.kind == "along" and f.pad == 0 and is_marker(f, subject.samples)}
    fields = {name: 1 - value.to(torch.int64) if name in masks else value for name, value in batch.fields.items()}
    fields = {name: value.to(batch.fields[name].dtype) for name, value in fields.items()}
    return replace(batch, fields=fields, axes=axes)


def two_dimensional_mask(subject: Subject, piece: Piece) -> str:
    """The error of a decoder layer that is handed a 2-D mask, if one is; an empty string otherwise."""
    if subject.model is None:
        return ""
    try:
        with torch.no_grad(), guard_decoder_layers(subject.model):
            subject.run(piece)
    except AttentionError as error:
        return "" if error.wrong.startswith("nothing to guard") else str(error)
    except Exception as error:  # the arrangement fails for another reason, which its own result already names
        return "" if not _is_mask_shape(error) else str(error)
    return ""


def _is_mask_shape(error: Exception) -> bool:
    text = str(error)
    return "must match the existing size" in text or ("must match the size of tensor b" in text and "mask" in text)
