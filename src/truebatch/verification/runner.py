"""Run the same samples in many arrangements and compare with one by one.

subject -> a mode without noise -> one by one -> every arrangement -> leaks, causality -> causes -> report
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from truebatch.errors import BatchError, MemoryLimitError, TruebatchError
from truebatch.progress import counted
from truebatch.training.checks.batch_coupling import find_couplings
from truebatch.training.checks.rounding import in_dtype
from truebatch.training.memory.oom import free_memory, is_out_of_memory
from truebatch.verification.arrangement_result import judge, may_be_rounding, run_one, with_padding_noted
from truebatch.verification.arrangements import Arrangement, alone, arrangements
from truebatch.verification.compare import (
    Reference,
    Whole,
    device_of,
    floating_dtype,
    run_whole,
)
from truebatch.verification.config import TOLERANCES, VerifyConfig
from truebatch.verification.determinism import Mode, quieted, steady_mode, steady_whole
from truebatch.verification.diagnosis.explanation import Seen, explain
from truebatch.verification.diagnosis.first_difference import uncompared_modules
from truebatch.verification.diagnosis.kept_state import kept_state
from truebatch.verification.diagnosis.unsteady import noise_words, state_cause
from truebatch.verification.references import (
    hidden_by_rounding,
    make_reference,
    refuse_without_fp32,
    rounded_reference,
    sharper_reference,
)
from truebatch.verification.report import ArrangementResult, Coverage, VerifyReport
from truebatch.verification.sample_sizes import check_samples, sized, takes_length
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.subject import Subject

Original = Callable[[Mode, Whole, Sequence[Any]], Whole]


def prove(
    subject: Subject | ListSubject,
    config: VerifyConfig,
    *,
    original: Original | None = None,
    chosen: Sequence[Arrangement] | None = None,
) -> VerifyReport:
    """Run every arrangement of the subject's samples (or those `chosen`) and compare with one by one (or `original`).

    `original` gets the mode, what the subject gave one by one and the samples, and returns what another function gives
    for them.

    Raises MemoryLimitError where memory runs out: that says nothing of the law.
    """
    try:
        check_samples(subject)
        fitted = subject if chosen is not None else sized(subject, config, is_free=original is None)
        return _prove(fitted, config, original, chosen)
    except Exception as error:  # a model may raise anything
        is_said = isinstance(error, TruebatchError)
        if isinstance(error, MemoryLimitError) or (is_said and not is_out_of_memory(error)):
            raise
        if not is_out_of_memory(error):
            raise BatchError(
                f"{_culprit(subject)} cannot be run alone, so there is nothing to compare with",
                seen=f"{type(error).__name__}: {error}",
                do="make it run on one sample at a time first; --debug (or the exception above) shows where it was raised",
            ) from error
        said = f"{type(error).__name__}: {(str(error) or 'no more is said').strip().splitlines()[0][:200]}"
    free_memory(device_of(subject), said=said)
    raise MemoryLimitError(
        "out of memory while the model was verified, so nothing is known about its batches",
        seen=said,
        do="free memory, or prove it on a machine with more; a run whose train.layout is set begins without this proof",
    )


def _culprit(subject: Subject | ListSubject) -> str:
    """The first sample that raises, by its number and length."""
    for at, piece in enumerate(alone(subject.lengths).pieces):
        try:
            with quieted(subject.model, "eval"), torch.no_grad():
                subject.run(piece)
        except Exception:  # it is the error that is being reported, found again
            return f"sample {at} (length {subject.lengths[at]})"
    return "a sample"


def _prove(
    subject: Subject | ListSubject,
    config: VerifyConfig,
    original: Original | None,
    chosen: Sequence[Arrangement] | None,
) -> VerifyReport:
    """As given; in half precision in fp32 first, where no fault hides in rounding."""
    if subject.model is None or config.tolerance is not None or floating_dtype(subject.model) in TOLERANCES:
        return _prove_as_given(subject, config, original, chosen).report
    dtype = str(floating_dtype(subject.model)).removeprefix("torch.")
    refuse_without_fp32(subject, alone(subject.lengths))
    with in_dtype(subject.model, torch.float32):
        structure = _prove_as_given(subject, config, original, chosen)
    report = structure.report
    if report.ok and structure.case is not None and structure.seen is not None:
        return _prove_half(report, structure.case, structure.seen)
    return replace(report, notes=[*report.notes, f"judged in fp32, where rounding to {dtype} hides nothing"])


def _prove_half(structure: VerifyReport, case: _Case, exact: Seen) -> VerifyReport:
    """The same in half precision, where fp32 is equal: only rounding is left, of outputs and loss in a quick proof."""
    subject, config, mode = case.subject, case.config, exact.mode
    chosen = _simplest(subject, config) if config.quick and case.chosen is None else case.chosen
    with quieted(subject.model, mode):
        one_by_one = run_whole(subject, case.singles, gradient=not config.quick)
    fp32 = replace(exact.alone, gradient={}) if config.quick else exact.alone
    seen = _compared(replace(case, chosen=chosen, exact=fp32), mode, one_by_one)
    note = "structure, leaks and causality were judged in fp32; here, one by one in fp32 is what is compared with"
    half = replace(
        structure, results=seen.results, limits=dict(seen.reference.limits), notes=[*structure.notes, note]
    )  # fmt: skip
    why = hidden_by_rounding(seen.reference)
    if why:
        kept = [replace(r, verdict="note") if r.verdict == "different" else r for r in seen.results]
        return replace(half, results=kept, unproven=why)
    if not _fails(seen, config):
        return half
    with quieted(subject.model, mode):
        report = explain(subject, case.singles, seen, config)
    return _finish(report, case, seen, None)


def _prove_as_given(
    subject: Subject | ListSubject,
    config: VerifyConfig,
    original: Original | None,
    chosen: Sequence[Arrangement] | None,
) -> _Proved:
    singles = alone(subject.lengths)
    kept = kept_state(subject.model)
    _learn_readings(subject, singles)
    mode, one_by_one = steady_mode(subject, singles)
    if mode is None or one_by_one is None:
        return _Proved(_unsteady(subject, singles))
    if isinstance(subject, ListSubject) and subject.model is not None and not one_by_one.loss:
        subject = replace(subject, expected=one_by_one.outputs)
        with quieted(subject.model, mode):
            one_by_one = run_whole(subject, singles)
    case = _Case(subject, config, singles, original, chosen, kept=kept)
    primary = _compared(case, mode, one_by_one)
    second = _in_eval(case) if mode != "eval" else None
    failing = second if not _fails(primary, config) and second is not None and _fails(second, config) else primary
    with quieted(subject.model, failing.mode):
        report = explain(subject, singles, failing, config)
    found = [*primary.results, *(_in_eval_mode(second) if second is not None else [])]
    return _Proved(_finish(replace(report, results=found), case, primary, second), case, primary)


def _unsteady(subject: Subject | ListSubject, singles: Arrangement) -> VerifyReport:
    """Numbers that are others each time: something is kept between calls, or drawn at random."""
    cause = state_cause(subject, singles.pieces, "eval")
    if cause is not None:
        return VerifyReport([], [cause], unproven=_OTHER_NUMBERS)
    drawn = noise_words(subject, singles.pieces[0])
    why = f"{_OTHER_NUMBERS}: {drawn} is the first operation whose result changes" if drawn else _OTHER_NUMBERS
    return VerifyReport([], unproven=why, notes=_NOISE)


_OTHER_NUMBERS = "the model gives other numbers each time it runs, even in eval mode"


def _learn_readings(subject: Subject | ListSubject, singles: Arrangement) -> None:
    """A few samples alone show how outputs are taken apart; what they raise is said where they are run in earnest."""
    if not isinstance(subject, Subject) or subject.readings is None:
        return
    by_length = sorted(range(len(subject.lengths)), key=lambda i: subject.lengths[i])
    for at in {by_length[0], by_length[len(by_length) // 2], by_length[-1]}:
        piece = singles.pieces[at]
        try:
            with quieted(subject.model, "eval"), torch.no_grad(), subject.learning(), subject.held(piece):
                subject.run(piece)
        except Exception as error:  # a model may raise anything, and raises it again where it is run in earnest
            if is_out_of_memory(error):
                raise


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    subject: Subject | ListSubject
    config: VerifyConfig
    singles: Arrangement
    original: Original | None
    chosen: Sequence[Arrangement] | None
    exact: Whole | None = None
    """For half precision: one by one in fp32."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the model held before it was first run."""


@dataclass(frozen=True, slots=True, eq=False)
class _Proved:
    report: VerifyReport
    case: _Case | None = None
    seen: Seen | None = None


def _compared(case: _Case, mode: Mode, one_by_one: Whole) -> Seen:
    """Every arrangement in one mode, beside one by one in that mode."""
    subject, original, config = case.subject, case.original, case.config
    rounding = ""
    with quieted(subject.model, mode):
        expected = one_by_one if original is None else original(mode, one_by_one, subject.samples)
        reference = _reference(case, expected)
        wanted = _wanted(subject, config) if case.chosen is None else list(case.chosen)
        runs = [case.singles, *wanted] if original is not None else wanted
        what = "comparing arrangements with one by one"
        results = [run_one(subject, arrangement, reference) for arrangement in counted(runs, what, len(runs))]
        if original is None and config.tolerance is None and may_be_rounding(results):
            sharper = sharper_reference(subject, one_by_one, case.singles)
            if sharper is not None:
                reference = sharper
                results = [r if r.verdict == "equal" else judge(r, reference) for r in results]
                rounding = (
                    f"fp32 rounds this model by {reference.limits['gradient'] / 2:.0e} one by one: judged against fp64"
                )
    return Seen(mode, one_by_one, reference, _within_limits(subject, with_padding_noted(results)), rounding, case.kept)


def _reference(case: _Case, expected: Whole) -> Reference:
    if case.exact is None:
        return make_reference(case.subject, expected, case.singles, case.config.tolerance)
    return rounded_reference(case.subject, expected, case.singles, case.exact, quick=case.config.quick)


def _within_limits(subject: Subject | ListSubject, results: Sequence[ArrangementResult]) -> list[ArrangementResult]:
    """Rows wider than any sample are noted, not judged, where the model takes no sample as long as they are."""

    def is_beyond(result: ArrangementResult) -> bool:
        width = max(piece.rows.width for piece in result.arrangement.pieces)
        is_wide = result.verdict == "raised" and result.arrangement.layout != "packed" and width > max(subject.lengths)
        return is_wide and isinstance(subject, Subject) and not takes_length(subject, width)

    return [replace(r, verdict="note") if is_beyond(r) else r for r in results]


def _in_eval(case: _Case) -> Seen | None:
    """The same without gradients in evaluation mode; None where there is no model, or noise even there."""
    if case.subject.model is None:
        return None
    try:
        one_by_one = steady_whole(case.subject, case.singles, "eval", gradient=False)
    except Exception as error:  # a model may be written for training alone; the report says what was compared
        if is_out_of_memory(error):
            raise
        return None
    if one_by_one is None or (not one_by_one.outputs and not one_by_one.loss):
        return None
    few = case.config.quick and case.chosen is None and case.original is None
    return _compared(replace(case, chosen=_simplest(case.subject, case.config)) if few else case, "eval", one_by_one)


def _simplest(subject: Subject | ListSubject, config: VerifyConfig) -> list[Arrangement]:
    """The first arrangement of every layout that counts."""
    found: dict[str, Arrangement] = {}
    for arrangement in _wanted(subject, config):
        found.setdefault(arrangement.layout, arrangement)
    return list(found.values())


def _in_eval_mode(seen: Seen) -> list[ArrangementResult]:
    """Of the second mode only what is not as it should be is listed."""
    bad = [r for r in seen.results if r.verdict in ("different", "raised")]
    return [
        replace(r, arrangement=replace(r.arrangement, name=f"{r.name}, in eval mode"), whole=r.whole)
        for r in bad
        if r.verdict == "different" or r.arrangement.layout == "right"
    ]


def _fails(seen: Seen, config: VerifyConfig) -> bool:
    return bool(VerifyReport(seen.results, used=config.used).broken)


_NOISE = (
    "randomness is left on (functional dropout, sampling, noise): switch it off, or key it by sample, and verify again",
)


def _unusable(whole: Whole) -> str:
    """Why one by one is no reference, if it is none."""
    for name, samples in whole.outputs.items():
        bad = [i for i, t in samples.items() if t.is_floating_point() and bool(t.isnan().any())]
        if bad:
            return f"{name!r} is NaN for sample {bad[0]} alone"
    zero = [n for n, samples in whole.outputs.items() if all(not t.any() for t in samples.values() if t.numel())]
    if zero and len(zero) == len(whole.outputs):
        return f"{zero[0]!r} is zero for every sample alone: nothing was computed, or an exception was swallowed"
    if not whole.outputs and not whole.loss:
        return "the subject gave neither outputs nor a loss"
    return ""


def _wanted(subject: Subject | ListSubject, config: VerifyConfig) -> list[Arrangement]:
    found = [a for a in arrangements(subject.lengths) if config.wants(a)]
    if isinstance(subject, Subject):
        return found
    return [a for a in found if a.layout == "right" and "padding" not in a.name and "wider" not in a.name]


def _empty_proof(results: Sequence[ArrangementResult], used: Sequence[str]) -> str:
    """Why results that are all equal prove nothing, if so."""
    counted = [r for r in results if r.arrangement.layout in used and r.name != "alone"]
    if counted and all(r.verdict == "raised" for r in counted):
        return f"the model refuses every layout that counts: {counted[0].error.splitlines()[0]}"
    if not any(r.name != "alone" for r in results):
        return "no arrangement was run: a function over a list of samples does its own padding, on the right to verify"
    if not any(r.differences or r.verdict == "raised" for r in results):
        return "nothing could be compared: no output or loss has a counterpart of the same name in the original"
    return ""


_FOREIGN = (
    "the model gives other numbers each time it runs in training mode (functional dropout, noise not keyed by sample): "
    "training is equal in distribution at most; what is compared here has it switched off"
)
_ONLY_EVAL = (
    "the model gives other numbers each time it runs in training mode (noise not keyed by sample), and it cannot be "
    "switched off: only eval mode was compared"
)


def _foreign_noise(case: _Case, mode: Mode) -> str:
    """Noise that nobody declared: dropout in a model's configuration is declared as a dropout module is."""
    if mode == "muted" and case.subject.model is not None:
        couplings = find_couplings(case.subject.model)
        if any(c.name == "dropout" and c.where.startswith("config.") for c in couplings):
            return ""
    return {"eval": _ONLY_EVAL, "muted": _FOREIGN, "train": ""}[mode]


def _finish(report: VerifyReport, case: _Case, primary: Seen, second: Seen | None) -> VerifyReport:
    notes = [*report.notes, *([primary.rounding] if primary.rounding else [])]
    modes = ["eval" if primary.mode == "eval" else "train", *(["eval"] if second is not None else [])]
    if primary.mode == "muted":
        notes.append("functional dropout is switched off for the proof, as dropout modules are")
    foreign = _foreign_noise(case, primary.mode)
    problem = _unusable(primary.alone) or _empty_proof(report.results, case.config.used) or foreign or report.unproven
    coverage = _coverage(case, primary, modes if case.subject.model is not None else [])
    return replace(
        report, unproven=problem, notes=notes, mode=modes[0], limits=dict(primary.reference.limits),
        used=case.config.used, coverage=coverage,
    )  # fmt: skip


def _coverage(case: _Case, seen: Seen, modes: Sequence[str]) -> Coverage:
    lengths = case.subject.lengths
    runs = [r.arrangement for r in seen.results if r.verdict != "raised"]
    rows = [piece.rows.num_rows for a in runs for piece in a.pieces]
    return Coverage(
        modes=tuple(modes), longest=max(lengths), shortest=min(lengths), rows=max(rows, default=1),
        gradient=bool(seen.reference.whole.gradient), unseen=_uncompared(case, seen.mode),
    )  # fmt: skip


def _uncompared(case: _Case, mode: Mode) -> tuple[str, ...]:
    """Asked of two samples together: alone, a leading axis of 1 passes for that of samples."""
    pair = next((p for a in arrangements(case.subject.lengths) if a.name == "cut in pairs" for p in a.pieces), None)
    if not isinstance(case.subject, Subject) or case.subject.model is None or pair is None:
        return ()
    try:
        with quieted(case.subject.model, mode):
            return tuple(name for name in uncompared_modules(case.subject, pair) if name)
    except Exception as error:  # a model that raises for two samples is told by its arrangements
        if is_out_of_memory(error):
            raise
        return ()
