"""Pick the fastest layout in which a model is right, by trying: nothing is ever assumed from its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np
from torch import nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import CELLS
from truebatch.errors import ConfigError, LawError, MemoryLimitError, TruebatchError
from truebatch.objective import Objective
from truebatch.planning.rows import padded_rows
from truebatch.verification.arrangements import ArrangedBatch, Arrangement
from truebatch.verification.config import VerifyConfig
from truebatch.verification.diagnosis.probes import changed_sample
from truebatch.verification.report import VerifyReport
from truebatch.verification.runner import prove
from truebatch.verification.subjects.subject import Subject, is_marker, model_subject

LayoutName = Literal["packed", "padded", "packed under a dense mask", "grouped"]

ORDER: tuple[LayoutName, ...] = ("packed", "padded", "packed under a dense mask", "grouped")
"""Fastest first. `grouped`: only samples of one length share a micro-batch, so nothing is padded."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutChoice:
    """The layout to use, and what came of those that were tried before it."""

    layout: LayoutName
    reports: Mapping[LayoutName, VerifyReport]
    reasons: Mapping[LayoutName, str]
    """Why each faster layout was not taken."""

    def __str__(self) -> str:
        tried = [f"  not {name}: {why}" for name, why in self.reasons.items()]
        return "\n".join([f"layout: {self.layout}", *tried])


def choose_layout(
    model: nn.Module,
    objective: Objective | None = None,
    samples: Sequence[Any] | None = None,
    fields: Sequence[Field] | None = None,
    *,
    config: VerifyConfig | None = None,
) -> LayoutChoice:
    """The fastest layout in which this model is proven equal to one by one.

    A Hugging Face model needs nothing else (samples are made up); another model needs its objective, samples and
    fields. Raises LawError with every reason if no layout is right.

    >>> from truebatch import choose_layout
    >>> from truebatch.testing.tiny_hf.model import tiny_model
    >>> print(choose_layout(tiny_model("llama")))
    layout: packed
    """
    settings = config or VerifyConfig()
    reports: dict[LayoutName, VerifyReport] = {}
    reasons: dict[LayoutName, str] = {}
    failed: list[TruebatchError] = []
    for layout in ORDER:
        subject = _subject(model, objective, samples, fields, layout, settings.causal)
        if subject is None:
            continue
        try:
            reports[layout] = try_layout(subject, layout, settings)
        except MemoryLimitError:
            raise  # nothing is known of this layout: a slower one would be taken for no reason
        except TruebatchError as error:
            failed.append(error)
            reasons[layout] = error.wrong
            continue
        if reports[layout].ok and not reports[layout].refused:
            return LayoutChoice(layout, reports, reasons)
        reasons[layout] = reason_against(reports[layout])
    if failed and len(failed) == len(reasons) and len({error.wrong for error in failed}) == 1:
        raise failed[0]  # whatever it is, it is not the layout
    raise LawError(
        "no layout of this model equals one by one",
        seen="; ".join(f"{name}: {why}" for name, why in reasons.items()),
        do="run it one sample at a time, or fix the cause that `verify` names",
    )


def is_proven(model: nn.Module, layout: LayoutName) -> bool:
    """Whether this Hugging Face model is proven equal to one by one in this layout, on made-up samples."""
    settings = VerifyConfig()
    subject = _subject(model, None, None, None, layout, settings.causal)
    assert subject is not None
    try:
        report = try_layout(subject, layout, settings)
    except MemoryLimitError:
        raise
    except TruebatchError:  # it cannot be run so
        return False
    return report.ok and not report.refused


def try_layout(subject: Subject, layout: LayoutName, config: VerifyConfig) -> VerifyReport:
    """Verify one layout."""
    if layout == "grouped":
        twins, arrangement = _with_twins(subject)
        return prove(twins, replace(config, layout="right"), chosen=[arrangement])
    return prove(subject, replace(config, layout="right" if layout == "padded" else "packed"))


def reason_against(report: VerifyReport) -> str:
    """One sentence on why a layout cannot be used."""
    if report.causes:
        return report.causes[0].words
    raised = [r for r in report.results if r.verdict == "raised"]
    if raised:
        return f"raises {raised[0].error.splitlines()[0]}"
    different = [r for r in report.results if r.verdict == "different"]
    return report.unproven or f"{len(different)} arrangements differ from one by one"


def _subject(
    model: Any, objective: Any, samples: Any, fields: Any, layout: LayoutName, causal: bool | None
) -> Subject | None:
    if objective is not None:
        if samples is None or fields is None:
            raise ConfigError(
                "choosing a layout needs samples and fields besides the objective",
                seen=f"samples={type(samples).__name__}, fields={type(fields).__name__}",
                do="call choose_layout(model, objective, samples, fields)",
            )
        under_mask = layout == "packed under a dense mask"
        return None if under_mask else model_subject(model, objective, samples, fields, causal)
    hf = import_module(
        "truebatch.verification.subjects.hf_subject"
    )  # transformers takes seconds to import: only when it is needed
    rows = "block" if layout == "packed under a dense mask" else "packed"
    subject: Subject = hf.hf_subject(model, samples or hf.random_samples(model), packed_rows=rows)
    return subject


def _with_twins(subject: Subject) -> tuple[Subject, Arrangement]:
    """Every sample and another of the same length, two by two: the cells of a group never need padding.

    Only the planned axis has one length in a group: a decoder's answers do not, and are padded there as everywhere.
    """
    samples, fields = subject.samples, subject.fields
    answered = {f.axis for f in fields if f.axis != CELLS and f.kind == "along" and is_marker(f, samples)}
    answers = [f.key for f in fields if f.axis in answered]
    twins = [
        {**changed_sample(subject, sample), **{key: other[key] for key in answers}}
        for sample, other in zip(samples, [*samples[1:], samples[0]], strict=True)
    ]
    number, lengths = len(twins), subject.lengths
    pieces = tuple(ArrangedBatch(padded_rows(np.array([i, number + i]), lengths[i])) for i in range(number))
    both = replace(subject, samples=[*subject.samples, *twins])
    return both, Arrangement("groups of equal length", "right", pieces)
