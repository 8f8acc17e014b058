"""Samples up to the sizes of the user's data: one of a single cell, one as long and as many as are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from truebatch.batch.fields import Field
from truebatch.errors import ConfigError, DataError
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch, alone
from truebatch.verification.config import VerifyConfig
from truebatch.verification.determinism import quieted
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.subject import Subject, as_array

Sample = Mapping[str, Any]


def sized(subject: Subject | ListSubject, config: VerifyConfig, *, is_free: bool) -> Subject | ListSubject:
    """The subject with the samples that its own lack: of one cell, and of what is asked for.

    One cell only where it can be run, if no other function must take it (`is_free`), and of no sample with images: their
    placeholders would be cut off, which some models notice only in company.
    """
    if isinstance(subject, ListSubject):
        _refuse_longer(subject.lengths, config)
        return replace(subject, samples=_repeated(subject.samples, config.rows))
    samples = list(subject.samples)
    if config.longest is not None and config.longest > max(subject.lengths):
        samples.append(lengthened(subject, config.longest))
    if is_free and min(subject.lengths) > 1 and not any(f.kind == "flat" for f in subject.fields):
        short = _of_one_cell(subject)
        samples += [short] if _is_sound(subject, short) else []
    return replace(subject, samples=_repeated(samples, config.rows))


def check_samples(subject: Subject | ListSubject) -> None:
    """Raise where no proof can be made of these samples: too few, of one length, or without fields."""
    lengths = subject.lengths
    if isinstance(subject, Subject) and not subject.fields:
        raise ConfigError(
            "verify needs the fields of a sample",
            seen="fields=[]",
            do="declare what a sample has: fields=[Field(name='ids')]",
        )
    if len(lengths) < 2:
        raise DataError(
            "a proof needs at least two samples",
            seen="1 sample" if lengths else "no samples",
            do="give about eight, short and long",
        )
    is_ragged = subject.is_ragged if isinstance(subject, Subject) else True
    if len(set(lengths)) == 1 and is_ragged:
        raise DataError(
            "all samples have the same length, so nothing would be padded and the proof would be empty",
            seen=f"{len(lengths)} samples of length {lengths[0]}",
            do="give samples of different lengths, some much shorter than others",
        )


def lengthened(subject: Subject, length: int) -> Sample:
    """The longest sample, repeated along the planned axis up to `length` cells."""
    lengths = subject.lengths
    longest = subject.samples[max(range(len(lengths)), key=lambda i: lengths[i])]
    times = -(-length // max(lengths))
    along = _along(subject)
    if any(f.kind == "flat" for f in subject.fields):
        raise ConfigError(
            "samples with parts of their own (images, patches) cannot be made longer",
            seen=f"longest={length}, the longest sample has {max(lengths)} cells",
            do="give a sample of that length",
        )
    return {**longest, **{f.key: _tiled(longest[f.key], f, times, length) for f in along}}


def takes_length(subject: Subject, length: int) -> bool:
    """True if a sample of this length can be run alone, as far as one can be made."""
    if any(f.kind == "flat" for f in subject.fields):
        return True
    return _is_sound(subject, lengthened(subject, length))


def _tiled(value: Any, field: Field, times: int, length: int) -> Any:
    if field.kind == "nested":
        return (list(value) * times)[:length]
    return np.concatenate([as_array(value)] * times)[:length]


def _along(subject: Subject) -> list[Field]:
    """The fields that lie along the planned axis."""
    axis = subject.planned.axis
    return [f for f in subject.fields if f.axis == axis and f.kind in ("along", "nested")]


def _of_one_cell(subject: Subject) -> Sample:
    lengths = subject.lengths
    shortest = subject.samples[min(range(len(lengths)), key=lambda i: lengths[i])]
    return {**shortest, **{f.key: shortest[f.key][:1] for f in _along(subject)}}


def _is_sound(subject: Subject, sample: Sample) -> bool:
    """True if the sample can be run alone and gives numbers."""
    trial = replace(subject, samples=[sample])
    piece: ArrangedBatch = alone(trial.lengths).pieces[0]
    try:
        with quieted(subject.model, "train"), torch.no_grad(), trial.held(piece):
            outcome = trial.run(piece)
    except Exception as error:  # what the model cannot take alone is no sample of its data
        if is_out_of_memory(error):
            raise
        return False
    found = [*(t for parts in outcome.outputs.values() for t in parts), *outcome.sums.values()]
    return all(bool(t.isfinite().all()) for t in found if t.is_floating_point())


def _repeated(samples: Sequence[Any], rows: int | None) -> list[Any]:
    number = max(len(samples), rows or 0)
    return [samples[at % len(samples)] for at in range(number)]


def _refuse_longer(lengths: Sequence[int], config: VerifyConfig) -> None:
    if config.longest is not None and config.longest > max(lengths):
        raise ConfigError(
            "the samples of a function cannot be made longer",
            seen=f"longest={config.longest}, the longest sample has {max(lengths)}",
            do="give a sample of that length",
        )
