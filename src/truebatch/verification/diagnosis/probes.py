"""Small experiments on a model: does a neighbour move a sample, does a later token move an earlier one?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from truebatch.attention.causal_mask import guard_decoder_layers
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch, RowAxis
from truebatch.errors import AttentionError
from truebatch.planning.rows import padded_rows
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch, Arrangement
from truebatch.verification.compare import relative, scale_of
from truebatch.verification.outputs import PerSample
from truebatch.verification.subjects.subject import Subject, as_array, is_marker

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


def _outputs(subject: Subject, piece: ArrangedBatch, samples: Sequence[Sample]) -> PerSample:
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
    """Another sample of the same shape, that the model takes alone.

    Other whole numbers of those that may stand anywhere, and other real numbers. Where that makes or unmakes
    placeholders (of images, say) and the model raises, the whole numbers change places, or stay.
    """
    exchanged = {f.key: _exchanged(subject, f, sample[f.key]) for f in _changeable(subject)}
    reversed_ = {f.key: _reversed(f, sample[f.key]) for f in _changeable(subject)}
    kept = {f.key: _exchanged(subject, f, sample[f.key]) for f in _changeable(subject) if not _is_whole(f, sample)}
    for new in (exchanged, {**reversed_, **kept}):
        if _is_taken(subject, {**sample, **new}):
            return {**sample, **new}
    return {**sample, **kept}


def _changeable(subject: Subject) -> list[Field]:
    """Whole numbers that lie flat (the sizes of images) say how the rest is to be read, and stay; so do markers."""
    shapes = {
        f.key for f in subject.fields if f.kind == "flat" and as_array(subject.samples[0][f.key]).dtype.kind != "f"
    }
    return [
        f
        for f in subject.fields
        if not ((f.kind == "once" and subject.is_ragged) or f.shift or f.key in shapes or is_marker(f, subject.samples))
    ]


def _exchanged(subject: Subject, field: Field, value: Any) -> Any:
    known = _known_values(subject, field)
    return [_other(v, known) for v in value] if field.kind == "nested" else _other(value, known)


def _reversed(field: Field, value: Any) -> Any:
    return (
        list(value)[::-1] if field.kind == "nested" else as_array(value)[::-1].copy() if as_array(value).ndim else value
    )


def _is_whole(field: Field, sample: Sample) -> bool:
    values = sample[field.key] if field.kind == "nested" else [sample[field.key]]
    return any(as_array(v).dtype.kind != "f" for v in values)


def _is_taken(subject: Subject, sample: Sample) -> bool:
    """True if the model runs on this sample alone."""
    trial = replace(subject, samples=[sample])
    piece = ArrangedBatch(padded_rows(np.array([0]), trial.lengths[0]))
    try:
        with torch.no_grad():
            trial.run(piece)
    except Exception as error:  # that is the question
        if is_out_of_memory(error):
            raise
        return False
    return True


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


def sees_later_tokens(subject: Subject, pieces: Sequence[ArrangedBatch], limit: float) -> float:
    """How far earlier cells of a sample alone move when its last token changes; 0 where that cannot be asked.

    Only what the labels are shifted from is changed: the source of a translation may be seen as a whole. `pieces` hold
    a sample each.
    """
    keys = {f.key for f in subject.fields if f.shift} or {f.key for f in _changeable(subject) if f.kind == "along"}
    fields = [f for f in _changeable(subject) if f.kind == "along" and f.key in keys]
    if not fields:
        return 0.0
    piece = max(pieces, key=lambda p: len(subject.samples[int(p.rows.ids[0])][fields[0].key]))
    sample = int(piece.rows.ids[0])
    length = len(subject.samples[sample][fields[0].key])
    before = _outputs(subject, piece, subject.samples)
    samples = list(subject.samples)
    samples[sample] = _with_other_last(subject, samples[sample], fields)
    after = _outputs(subject, piece, samples)
    parts = [(before[n][0], after[n][0]) for n in before if before[n][0].shape[:1] == (length,)]
    moved = [relative(b[:-1], a[:-1], scale_of([a])) for a, b in parts if length > 1]
    return max((m for m in moved if not m <= limit), default=0.0)


def _with_other_last(subject: Subject, sample: Sample, fields: Sequence[Field]) -> Sample:
    """The last token exchanged, or replaced by another of the sample where that one cannot stand there."""
    values = {f.key: as_array(sample[f.key]) for f in fields}
    ways = [{f.key: _exchanged(subject, f, sample[f.key])[-1:] for f in fields}]
    ways += [{key: value[at : at + 1] for key, value in values.items()} for at in range(min(4, len(sample)))]
    for way in ways:
        new = {**sample, **{key: np.concatenate([value[:-1], way[key]]) for key, value in values.items()}}
        if any(not np.array_equal(new[key], values[key]) for key in values) and _is_taken(subject, new):
            return new
    return sample


def context_move(subject: Subject, piece: ArrangedBatch) -> float:
    """How far the later half of a sample alone moves when its earlier half is another; infinite where nobody can ask.

    That is how visible a leak can be at most: a neighbour reaches a cell as the cells of its own sample do.
    """
    sample = int(piece.rows.ids[0])
    length, old = subject.lengths[sample], subject.samples[sample]
    axis = subject.planned.axis
    fields = [f for f in _changeable(subject) if f.axis == axis and f.kind in ("along", "nested")]
    changed, half = changed_sample(subject, old), max(1, length // 2)
    new = {**old, **{f.key: _joined(f, changed[f.key], old[f.key], half) for f in fields}}
    if length < 2 or not fields or not _is_taken(subject, new):
        return math.inf
    samples = list(subject.samples)
    samples[sample] = new
    before, after = _outputs(subject, piece, subject.samples), _outputs(subject, piece, samples)
    moves = []
    for name, (value, *_) in before.items():
        start = half if value.shape[:1] == (length,) else 0
        moves.append(relative(after[name][0][start:] if value.ndim else after[name][0], value[start:] if value.ndim else value,
                              scale_of([value])))  # fmt: skip
    return max(moves, default=math.inf)


def mixes_no_cells(subject: Subject, piece: ArrangedBatch) -> bool:
    """True if a cell's result depends on that cell alone, whatever the weights are.

    Weights may hide a path between cells, as an output projection that begins at zero does. Random ones open it.
    """
    if subject.model is None:
        return False
    weights = [p for p in subject.model.parameters() if p.is_floating_point()]
    kept = [p.detach().to("cpu", copy=True) for p in weights]
    try:
        generator = torch.Generator().manual_seed(0)
        for weight in weights:
            noise = torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, 0.2, generator=generator)
            weight.data.add_(noise.to(weight.device, weight.dtype))
        return context_move(subject, piece) == 0.0
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)


def _joined(field: Field, first: Any, second: Any, at: int) -> Any:
    if field.kind == "nested":
        return [*list(first)[:at], *list(second)[at:]]
    return np.concatenate([as_array(first)[:at], as_array(second)[at:]])


def is_right_when_flipped(subject: Subject, alone: Arrangement, piece: ArrangedBatch, limit: float) -> bool:
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


def two_dimensional_mask(subject: Subject, piece: ArrangedBatch) -> str:
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
