"""Run the same samples in many arrangements and compare with one by one.

subject -> a mode without noise -> one by one -> every arrangement -> leaks, causality -> causes -> report
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from truebatch.errors import ConfigError, DataError, MemoryLimitError
from truebatch.proof.arrangements import LAYOUTS, Arrangement, alone, arrangements
from truebatch.proof.causes import Evidence, name_causes
from truebatch.proof.comparing import (
    ROUNDING,
    Reference,
    Runnable,
    Whole,
    device_of,
    differences,
    make_reference,
    run_whole,
    samples_over,
    sharper_reference,
)
from truebatch.proof.functions import ListSubject
from truebatch.proof.generating import generates_right_padded
from truebatch.proof.probes import (
    LeakTest,
    find_leaks,
    is_right_when_flipped,
    sees_later_tokens,
    two_dimensional_mask,
)
from truebatch.proof.quiet import Mode, quieted, steady_mode
from truebatch.proof.report import Cause, Result, Verdict, VerifyReport
from truebatch.proof.subjects import Subject
from truebatch.proof.tracing import ModuleDifference, count_calls, first_difference
from truebatch.training.outofmemory import free_memory, is_out_of_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """What is put to the proof and how strictly.

    >>> from truebatch import VerifyConfig
    >>> VerifyConfig(layout="packed", tolerance=1e-5).layout
    'packed'
    """

    layout: Literal["all", "right", "left", "packed", "padded"] = "all"
    """Only these arrangements; `padded` is right and left."""
    tolerance: float | None = None
    """Largest relative difference allowed; by default what the dtype promises (half precision: against fp32)."""
    causal: bool | None = None
    """Whether later tokens must not move earlier ones; by default yes if labels are the next tokens."""

    def __post_init__(self) -> None:
        if self.layout not in ("all", "padded", *LAYOUTS):
            raise ConfigError(
                "unknown layout", seen=f"layout={self.layout!r}", do=f"use one of {('all', 'padded', *LAYOUTS)}"
            )
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ConfigError(
                "a tolerance is a small number of 0 or more", seen=f"tolerance={self.tolerance}", do="try 1e-5"
            )

    def wants(self, arrangement: Arrangement) -> bool:
        """True if this arrangement belongs to the layouts asked for."""
        wanted = {"all": LAYOUTS, "padded": ("right", "left")}.get(self.layout, (self.layout,))
        return arrangement.layout in wanted


def prove(
    subject: Subject | ListSubject,
    config: VerifyConfig,
    *,
    original: Callable[[Mode, Whole], Whole] | None = None,
    chosen: Sequence[Arrangement] | None = None,
) -> VerifyReport:
    """Run every arrangement of the subject's samples (or those `chosen`) and compare with one by one (or `original`).

    `original` gets the mode and what the subject gave one by one, and returns what another function gives for the samples.

    Raises MemoryLimitError where memory runs out: that says nothing of the law.
    """
    try:
        return _prove(subject, config, original, chosen)
    except Exception as error:
        if isinstance(error, MemoryLimitError) or not is_out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {(str(error) or 'no more is said').strip().splitlines()[0][:200]}"
    free_memory(device_of(subject), said=said)
    raise MemoryLimitError(
        "memory ran out while the model was put to the proof, so nothing is known of its batches",
        seen=said,
        do="free memory, or prove it on a machine with more; a run whose train.layout is set begins without this proof",
    )


def _prove(
    subject: Subject | ListSubject,
    config: VerifyConfig,
    original: Callable[[Mode, Whole], Whole] | None,
    chosen: Sequence[Arrangement] | None,
) -> VerifyReport:
    lengths = subject.lengths
    _check_samples(lengths)
    singles = alone(lengths)
    mode, one_by_one = steady_mode(subject, singles)
    if mode is None or one_by_one is None:
        return VerifyReport(
            [], unproven="the model gives other numbers each time it runs, even in eval mode", notes=_NOISE
        )
    problem, rounding = _unusable(one_by_one), ""
    with quieted(subject.model, mode):
        expected = one_by_one if original is None else original(mode, one_by_one)
        reference = make_reference(subject, expected, singles, config.tolerance)
        wanted = _wanted(subject, config) if chosen is None else list(chosen)
        runs = [singles, *wanted] if original is not None else wanted
        results = [_run_one(subject, arrangement, reference) for arrangement in runs]
        if original is None and config.tolerance is None and _may_be_rounding(results):
            sharper = sharper_reference(subject, one_by_one, singles)
            if sharper is not None:
                reference = sharper
                results = [r if r.verdict == "equal" else _judge(r, reference) for r in results]
                rounding = (
                    f"fp32 rounds this model by {reference.limits['gradient'] / 2:.0e} one by one: judged against fp64"
                )
        report = _explain(subject, singles, results, reference, one_by_one)
    return _finish(report, mode, reference, problem, rounding)


PLAIN_MOVE = 0.1
"""A sample that moves itself this far shows any leak, however wide the limits of half precision are."""


def _may_be_rounding(results: Sequence[Result]) -> bool:
    over = [d for r in results for d in r.differences if d.is_over]
    return bool(over) and all(d.value < ROUNDING for d in over)


def _judge(result: Result, reference: Reference) -> Result:
    """The same run against another reference."""
    if result.whole is None:
        return result
    found = tuple(differences(result.whole, reference))
    verdict: Verdict = "different" if any(d.is_over for d in found) else "equal"
    return Result(
        result.arrangement, verdict, found, frozenset(samples_over(result.whole, reference)), whole=result.whole
    )


_NOISE = (
    "randomness is left on (functional dropout, sampling, noise): switch it off, or key it by sample, and verify again",
)


def _check_samples(lengths: Sequence[int]) -> None:
    if len(lengths) < 2:
        raise DataError(
            "a proof needs at least two samples", seen=f"{len(lengths)} samples", do="give about eight, short and long"
        )
    if len(set(lengths)) == 1:
        raise DataError(
            "all samples have the same length, so nothing would be padded and the proof would be empty",
            seen=f"{len(lengths)} samples of length {lengths[0]}",
            do="give samples of different lengths, some much shorter than others",
        )


def _unusable(whole: Whole) -> str:
    """Why one by one is no reference, if it is none."""
    for name, samples in whole.outputs.items():
        bad = [i for i, t in samples.items() if t.is_floating_point() and bool(torch.isnan(t).any())]
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


def _run_one(subject: Runnable, arrangement: Arrangement, reference: Reference) -> Result:
    try:
        whole = run_whole(subject, arrangement, gradient=bool(reference.whole.gradient))
        found = _judge(Result(arrangement, "equal", whole=whole), reference)
    except Exception as error:  # whatever a model raises is a result of this arrangement, reported by name
        if isinstance(error, ConfigError | DataError) or is_out_of_memory(error):
            raise
        return Result(arrangement, "raised", error=f"{type(error).__name__}: {error}")
    if found.verdict == "different" and _may_be_rounding([found]):
        return found
    return replace(found, whole=replace(whole, gradient={}))  # as large as the model, and not looked at again


def _explain(
    subject: Subject | ListSubject, singles: Arrangement, results: list[Result], reference: Reference, one: Whole
) -> VerifyReport:
    if isinstance(subject, ListSubject):
        return _explain_functions(subject, singles, results, one)
    by_name = {r.name: r for r in results}
    leak_tests = _leak_tests(subject, results, reference)
    leaks = tuple(leak for test in leak_tests for leak in test.leaks)
    limit = reference.limits["outputs"]
    longest = max(range(len(subject.lengths)), key=lambda i: subject.lengths[i])
    later = sees_later_tokens(subject, singles.pieces[longest], limit) if subject.causal else 0.0
    failing = [
        r for r in results if r.verdict == "different" or (r.verdict == "raised" and r.arrangement.layout == "right")
    ]
    first = _first_module(subject, singles, results, limit)
    suspicious = bool(failing or leaks or later or any(not t.isfinite().all() for t in _floats(one)))
    evidence = Evidence(
        results=by_name,
        alone=one.outputs,
        leaks=leaks,
        first_module=first,
        mask_error=_mask_error(subject, results, singles) if suspicious else "",
        is_flipped=suspicious and _is_flipped(subject, singles, results, limit),
        later_tokens=later,
        row_zero={r.name: int(r.arrangement.pieces[0].rows.ids[0]) for r in results},
        longest=longest,
        generates_right=_generates_right(subject, singles, results),
    )
    causes = name_causes(evidence) if suspicious else []
    notes = [*_notes(subject, singles, results), *_nan_notes(subject, results, reference)]
    own = min((test.own_move for test in leak_tests), default=0.0)
    if leak_tests and own < min(100 * limit, PLAIN_MOVE):
        notes.append(f"changing a sample moves its own result by {own:.1e} only: a leak that small would not be seen")
    return VerifyReport(results, causes, first, leaks, notes, leak_visible=own)


def _floats(whole: Whole) -> list[torch.Tensor]:
    return [t for samples in whole.outputs.values() for t in samples.values() if t.is_floating_point()]


def _explain_functions(subject: ListSubject, singles: Arrangement, results: list[Result], one: Whole) -> VerifyReport:
    evidence = Evidence(
        {r.name: r for r in results}, one.outputs, (), None, "", False, 0.0,
        {r.name: int(r.arrangement.pieces[0].rows.ids[0]) for r in results}, -1,
        _generates_right(subject, singles, results),
    )  # fmt: skip
    failing = [r for r in results if r.verdict == "different"]
    if failing and failing[0].name == "alone" and failing[0].is_over("outputs"):
        return VerifyReport(results, [_ANOTHER_FUNCTION])
    causes = (
        [c if c.name != "a mean over padding" else _PADDING_REACHES for c in name_causes(evidence)] if failing else []
    )
    return VerifyReport(results, causes)


def _generates_right(subject: Subject | ListSubject, singles: Arrangement, results: list[Result]) -> bool:
    """Look at the shortest sample that differs with padding on the right, or wherever a function puts it."""
    failing = next((r for r in results if r.moved and r.arrangement.layout == "right" and r.name != "alone"), None)
    if failing is None:
        return False
    sample = min(failing.moved, key=lambda i: subject.lengths[i])
    piece = next(p for p in failing.arrangement.pieces if sample in p.rows.ids)
    return generates_right_padded(subject, singles.pieces[sample], piece)


_ANOTHER_FUNCTION = Cause(
    "another function",
    "the batched function differs from the original for a single sample already, so batching is not the reason",
    "compare the two functions on one sample first: preprocessing, special tokens, dtype, eval mode",
)


_PADDING_REACHES = Cause(
    "padding reaches the result",
    "the result of a sample changes with the lengths of its neighbours: a mask is not used, or a mean takes padding in",
    "look at every reduction over cells and at the mask of every attention; with `fields`, verify names the module",
)


_LEAK_TESTED = ("right padded", "left padded", "packed", "groups of equal length")
"""One arrangement of every layout is enough: a changed neighbour must not move a sample in any of them."""


def _leak_tests(subject: Subject, results: list[Result], reference: Reference) -> list[LeakTest]:
    if not reference.whole.outputs:
        return []  # A model that gives its loss alone: loss and gradients are compared, and nobody's own result is known.
    limit = reference.limits["outputs"]
    wanted = [r for r in results if r.name in _LEAK_TESTED and r.verdict != "raised"]
    return [find_leaks(subject, r.arrangement, limit) for r in wanted]


def _first_module(
    subject: Subject, singles: Arrangement, results: list[Result], limit: float
) -> ModuleDifference | None:
    failing = next((r for r in results if r.verdict == "different" and r.moved), None)
    if failing is None or subject.model is None:
        return None
    sample = min(failing.moved, key=lambda i: subject.lengths[i])
    piece = next(p for p in failing.arrangement.pieces if sample in p.rows.ids)
    return first_difference(subject, singles.pieces[sample], piece, sample, limit)


def _mask_error(subject: Subject, results: list[Result], singles: Arrangement) -> str:
    pieces = [r.arrangement.pieces[0] for r in results if r.arrangement.layout == "right"][:1]
    return next((text for p in [*pieces, singles.pieces[0]] if (text := two_dimensional_mask(subject, p))), "")


def _is_flipped(subject: Subject, singles: Arrangement, results: list[Result], limit: float) -> bool:
    """Exchange True and False in the masks, and look whether that mends it, with padding on either side.

    On the right alone it proves nothing: a causal cell never looks there, so a right mask turned about agrees as well.
    """
    padded = [r for r in results if r.name in ("right padded", "left padded") and r.verdict != "raised"]
    if not any(r.is_over("outputs") for r in padded):
        return False
    try:
        return all(is_right_when_flipped(subject, singles, r.arrangement.pieces[0], limit) for r in padded)
    except (RuntimeError, ValueError, IndexError):  # a model need not accept masks turned inside out
        return False


def _notes(subject: Subject, singles: Arrangement, results: list[Result]) -> list[str]:
    right = next((r for r in results if r.name == "right padded" and r.verdict == "equal"), None)
    if right is None or subject.model is None or len(subject.lengths) < 3:
        return []
    together = count_calls(subject, right.arrangement.pieces[0])
    single = count_calls(subject, singles.pieces[0])
    if single and together >= 0.9 * single * len(subject.lengths):
        return [
            f"this batch is a Python loop: {together} module calls for {len(subject.lengths)} samples, {single} for one; "
            "it is right, but no faster than one by one"
        ]
    return []


def _nan_notes(subject: Subject, results: list[Result], reference: Reference) -> list[str]:
    """Correct masks still give 0 * NaN, so NaN in padding is told, not judged."""
    right = next((r for r in results if r.name == "right padded" and r.verdict == "equal"), None)
    has_floats = any(subject.micro_batch(singles).fields[f.name].is_floating_point() for f in subject.fields
                     for singles in right.arrangement.pieces[:1]) if right else False  # fmt: skip
    if right is None or not has_floats:
        return []
    result = _run_one(subject, right.arrangement.filled("nan"), reference)
    if result.verdict == "equal":
        return ["NaN in the padding does not reach the results either"]
    return ["NaN in the padding reaches the results (finite garbage does not: 0 * NaN is NaN): keep padding finite"]


def _empty_proof(results: Sequence[Result]) -> str:
    """Why results that are all equal prove nothing, if so."""
    if not any(r.name != "alone" for r in results):
        return "no arrangement was run: a function over a list of samples does its own padding, on the right to verify"
    if not any(r.differences or r.verdict == "raised" for r in results):
        return "nothing could be compared: no output or loss has a counterpart of the same name in the original"
    return ""


def _finish(report: VerifyReport, mode: Mode, reference: Reference, problem: str, rounding: str) -> VerifyReport:
    notes = [*report.notes, *([rounding] if rounding else [])]
    if mode == "eval":
        notes.append("randomness is left on in training mode (functional dropout or noise): compared in eval mode")
    unproven = problem or _empty_proof(report.results)
    return VerifyReport(
        report.results, report.causes, report.first_module, report.leaks, notes, unproven, mode, report.leak_visible,
        dict(reference.limits),
    )  # fmt: skip
