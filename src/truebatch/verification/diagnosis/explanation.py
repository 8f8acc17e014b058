"""Why arrangements differ: small experiments on the model, the first module that differs, and notes on what was
seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from truebatch.progress import stage
from truebatch.training.checks.batch_coupling import Coupling, find_couplings
from truebatch.verification.arrangement_result import run_one
from truebatch.verification.arrangements import ArrangedBatch, Arrangement
from truebatch.verification.compare import Reference, Whole
from truebatch.verification.config import VerifyConfig
from truebatch.verification.determinism import Mode, quieted
from truebatch.verification.diagnosis.diagnose import Evidence, name_causes
from truebatch.verification.diagnosis.first_difference import (
    ModuleDifference,
    count_calls,
    first_difference,
    where_raised,
)
from truebatch.verification.diagnosis.gradient_cause import gradient_cause
from truebatch.verification.diagnosis.loss_probe import function_loss_cause, loss_cause
from truebatch.verification.diagnosis.probes import (
    LeakTest,
    context_move,
    find_leaks,
    is_right_when_flipped,
    mixes_no_cells,
    sees_later_tokens,
    two_dimensional_mask,
)
from truebatch.verification.diagnosis.trace.culprit import Culprit, find_culprit
from truebatch.verification.diagnosis.trace.sample_parts import CELLS
from truebatch.verification.diagnosis.unsteady import shape_cause, state_cause
from truebatch.verification.report import ArrangementResult, Cause, VerifyReport
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.padding_side import generates_right_padded
from truebatch.verification.subjects.subject import Subject

MOST_SUSPECTS = 6
"""Samples that are traced where a model tells nothing of single samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Every arrangement in one mode."""

    mode: Mode
    alone: Whole
    reference: Reference
    results: list[ArrangementResult]
    rounding: str = ""
    """Why fp64 was the judge, if it was."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the model held before it was first run."""


@stage("looking for leaks, the module and the cause")
def explain(subject: Subject | ListSubject, singles: Arrangement, seen: Seen, config: VerifyConfig) -> VerifyReport:
    """Leaks, causes and notes; the model must be in the mode in which the results were got."""
    if isinstance(subject, ListSubject):
        return _explain_functions(subject, singles, seen.results, seen.alone)
    results, reference, one = seen.results, seen.reference, seen.alone
    used = [r for r in results if r.arrangement.layout in config.used]
    leak_tests = _leak_tests(subject, used, reference, few=config.quick)
    leaks = tuple(leak for test in leak_tests for leak in test.leaks)
    limit = reference.limits["outputs"]
    longest = max(range(len(subject.lengths)), key=lambda i: subject.lengths[i])
    later = sees_later_tokens(subject, singles.pieces, limit) if subject.causal else 0.0
    failing = [
        r for r in used if r.verdict == "different" or (r.verdict == "raised" and r.arrangement.layout == "right")
    ]
    others = [r for r in results if r.verdict == "different" and r.arrangement.layout not in config.used]
    first = _first_module(subject, singles, used, limit)
    culprit = _culprit(subject, singles, used if failing else others, limit)
    suspicious = bool(failing or leaks or later or any(not t.isfinite().all() for t in _floats(one)))
    evidence = Evidence(
        results={r.name: r for r in results},
        alone=one.outputs,
        leaks=leaks,
        first_module=first if suspicious else _first_module(subject, singles, others, limit),
        mask_error=_mask_error(subject, results, singles) if suspicious else "",
        is_flipped=suspicious and _is_flipped(subject, singles, results, limit),
        later_tokens=later,
        row_zero={r.name: int(r.arrangement.pieces[0].rows.ids[0]) for r in results},
        longest=longest,
        culprit=culprit,
        probed=_probed(subject, singles, used, seen) if suspicious or failing else (),
        raised_at=_raised_at(subject, used),
        generates_right=_generates_right(subject, singles, used),
    )
    causes = name_causes(evidence) if suspicious else []
    notes = [] if config.quick else _notes(subject, singles, results)
    notes += [*_nan_notes(subject, results, reference), *_padding_notes(results)]
    if others and not suspicious:
        notes += [f"a layout that is not in use differs: {c.words}" for c in name_causes(evidence)]
    coupled = [_coupling(c) for c in find_couplings_in_training(subject.model)]
    known = {c.name for c in causes}
    unproven = _no_context(subject, singles.pieces[longest], reference) if not suspicious else ""
    own = min((test.own_move for test in leak_tests), default=0.0)
    if leak_tests and own < min(100 * limit, PLAIN_MOVE):
        notes.append(f"changing a sample moves its own result by {own:.1e} only: a leak that small would not be seen")
    causes += [c for c in coupled if c.name not in known]
    first = first if culprit is None else _traced_module(subject, culprit)
    return VerifyReport(results, causes, first, leaks, notes, leak_visible=own, used=config.used, unproven=unproven)


def _no_context(subject: Subject, piece: ArrangedBatch, reference: Reference) -> str:
    """Why a leak could not have been seen, if so: what lies beside a cell hardly moves it, in its own sample too."""
    limit = reference.limits["outputs"]
    if not reference.whole.outputs:
        return ""
    moved = context_move(subject, piece)
    if moved >= min(10 * limit, PLAIN_MOVE) or (moved == 0.0 and mixes_no_cells(subject, piece)):
        return ""
    return f"context hardly matters to this model: other cells of a sample move it by {moved:.0e}, and a leak would not be seen"


PLAIN_MOVE = 0.1
"""A sample that moves itself this far shows any leak, however wide the limits of half precision are."""


def find_couplings_in_training(model: nn.Module | None) -> list[Coupling]:
    """What training refuses, whatever was seen; dropout is switched off for the proof, and not among them."""
    if model is None:
        return []
    with quieted(model, "train"):
        found = find_couplings(model)
    return [c for c in found if c.name != "dropout"]


def _coupling(found: Coupling) -> Cause:
    return Cause(found.name, f"training refuses {found.where}: {found.words}", found.fix)


def _padding_notes(results: Sequence[ArrangementResult]) -> list[str]:
    found = []
    if any(r.verdict == "note" and "wider" in r.name for r in results):
        found.append("rows wider than the longest sample are more than the model takes, one by one too: not judged")
    if not any(r.verdict == "note" and r.arrangement.pieces[0].filling != "declared" for r in results):
        return found
    return [
        *found,
        "the content of the padding reaches the results, which are right as long as it is the declared pad value: "
        "the model may find its padding by it (ids != pad)",
    ]


def _floats(whole: Whole) -> list[torch.Tensor]:
    return [t for samples in whole.outputs.values() for t in samples.values() if t.is_floating_point()]


def _explain_functions(
    subject: ListSubject, singles: Arrangement, results: list[ArrangementResult], one: Whole
) -> VerifyReport:
    evidence = Evidence(
        results={r.name: r for r in results}, alone=one.outputs, leaks=(), first_module=None, mask_error="",
        is_flipped=False, later_tokens=0.0, longest=-1,
        row_zero={r.name: int(r.arrangement.pieces[0].rows.ids[0]) for r in results},
        generates_right=_generates_right(subject, singles, results),
        probed=tuple(c for c in [function_loss_cause(subject, results)] if c is not None),
    )  # fmt: skip
    failing = [r for r in results if r.verdict == "different"]
    if failing and failing[0].name == "alone" and failing[0].is_over("outputs"):
        return VerifyReport(results, [_ANOTHER_FUNCTION])
    if _goes_on_after_the_end(failing, one):
        return VerifyReport(results, [_AFTER_THE_END])
    causes = (
        [c if c.name != "a mean over padding" else _PADDING_REACHES for c in name_causes(evidence)] if failing else []
    )
    statistics = [_coupling(c) for c in find_couplings_in_training(subject.model) if c.name == "batch statistics"]
    return VerifyReport(results, [*statistics, *causes] if failing and failing[0].is_over("outputs") else causes)


def _generates_right(subject: Subject | ListSubject, singles: Arrangement, results: list[ArrangementResult]) -> bool:
    """Look at the shortest sample that differs with padding on the right, or wherever a function puts it."""
    failing = next((r for r in results if r.moved and r.arrangement.layout == "right" and r.name != "alone"), None)
    if failing is None:
        return False
    sample = min(failing.moved, key=lambda i: subject.lengths[i])
    piece = next(p for p in failing.arrangement.pieces if sample in p.rows.ids)
    return generates_right_padded(subject, singles.pieces[sample], piece)


def _goes_on_after_the_end(failing: Sequence[ArrangementResult], one: Whole) -> bool:
    """Whether all that differs are whole numbers that begin as they do alone, with more behind."""
    pairs = [
        (one.outputs[name][sample], given[sample])
        for r in failing
        for name, given in ({} if r.whole is None else r.whole.outputs).items()
        for sample in r.moved
        if name in one.outputs and sample in given
    ]
    differing = [(own, given) for own, given in pairs if own.shape != given.shape or not torch.equal(own, given)]
    return bool(differing) and all(
        own.ndim == given.ndim == 1
        and not given.is_floating_point()
        and len(given) > len(own)
        and torch.equal(given[: len(own)], own)
        for own, given in differing
    )


_AFTER_THE_END = Cause(
    "kept after the end",
    "a text of a batch goes on after its end: it begins as it does alone, and has what its row got while others went on",
    "cut every sample at its first end token before it is returned",
)
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


def _leak_tests(
    subject: Subject, results: Sequence[ArrangementResult], reference: Reference, *, few: bool
) -> list[LeakTest]:
    if not reference.whole.outputs:
        return []  # A model that gives its loss alone: loss and gradients are compared, and nobody's own result is known.
    limit = reference.limits["outputs"]
    wanted = [r for r in results if r.name in _LEAK_TESTED and r.verdict != "raised"]
    return [find_leaks(subject, r.arrangement, limit, few=few) for r in wanted]


def _first_module(
    subject: Subject, singles: Arrangement, results: list[ArrangementResult], limit: float
) -> ModuleDifference | None:
    failing = _failing(results)
    if failing is None or subject.model is None:
        return None
    for sample in _suspects(failing, subject):
        piece = next(p for p in failing.arrangement.pieces if sample in p.rows.ids)
        found = first_difference(subject, singles.pieces[sample], piece, sample, limit)
        if found is not None:
            return found
    return None


def _failing(results: Sequence[ArrangementResult]) -> ArrangementResult | None:
    """The first arrangement that says something of samples: one that moved, or a model whose only result is a loss."""
    return next((r for r in results if r.verdict == "different" and (r.moved or not r.has_outputs)), None)


def _suspects(failing: ArrangementResult, subject: Subject) -> list[int]:
    """The shortest sample that moved; where nothing is known of single samples, each, the last one of a row first."""
    if failing.moved:
        return [min(failing.moved, key=lambda i: subject.lengths[i])]
    return [int(i) for piece in failing.arrangement.pieces for i in reversed(piece.rows.ids)][:MOST_SUSPECTS]


def _traced_module(subject: Subject, culprit: Culprit) -> ModuleDifference:
    """The module in which the traced operation runs."""
    assert subject.model is not None
    suspect = culprit.suspect
    name, operation = suspect.operation.module, suspect.operation
    module = dict(subject.model.named_modules())[name]
    by_cell = CELLS in (suspect.output or ())
    where = f"{operation.name} at {operation.source}"
    return ModuleDifference(name, type(module).__name__, module, culprit.sample, suspect.gap, by_cell, where)


def _probed(
    subject: Subject, singles: Arrangement, results: Sequence[ArrangementResult], seen: Seen
) -> tuple[Cause, ...]:
    """Causes that small experiments say for sure: state between calls, the loss, the gradient."""
    failing = _failing(results)
    kept = None if failing is None or not failing.moved else shape_cause(subject, failing, seen.reference, seen.kept)
    found = (
        state_cause(subject, singles.pieces, seen.mode) or kept,
        loss_cause(subject, results),
        gradient_cause(subject, results, seen.reference),
    )
    return tuple(cause for cause in found if cause is not None)


def _raised_at(subject: Subject, results: Sequence[ArrangementResult]) -> str:
    """What the first arrangement raises that a model must take, and in which module and line."""
    raised = next((r for r in results if r.verdict == "raised" and r.arrangement.layout == "right"), None)
    return "" if raised is None else where_raised(subject, raised.arrangement.pieces)


def _culprit(
    subject: Subject, singles: Arrangement, results: Sequence[ArrangementResult], limit: float
) -> Culprit | None:
    if subject.model is None:
        return None
    failing = _failing(results)
    if failing is None:
        return None
    if failing.moved:
        return find_culprit(subject, singles.pieces, failing, limit)
    tried = (replace(failing, moved=frozenset({sample})) for sample in _suspects(failing, subject))
    return next((found for one in tried if (found := find_culprit(subject, singles.pieces, one, limit))), None)


def _mask_error(subject: Subject, results: list[ArrangementResult], singles: Arrangement) -> str:
    pieces = [r.arrangement.pieces[0] for r in results if r.arrangement.layout == "right"][:1]
    return next((text for p in [*pieces, singles.pieces[0]] if (text := two_dimensional_mask(subject, p))), "")


def _is_flipped(subject: Subject, singles: Arrangement, results: list[ArrangementResult], limit: float) -> bool:
    """Exchange True and False in the masks, and check whether that fixes it, with padding on either side.

    On the right alone it proves nothing: a causal cell never looks there, so a right mask turned about agrees as well.
    """
    padded = [r for r in results if r.name in ("right padded", "left padded") and r.verdict != "raised"]
    if not any(r.is_over("outputs") for r in padded):
        return False
    try:
        return all(is_right_when_flipped(subject, singles, r.arrangement.pieces[0], limit) for r in padded)
    except (RuntimeError, ValueError, IndexError):  # a model need not accept masks turned inside out
        return False


def _notes(subject: Subject, singles: Arrangement, results: list[ArrangementResult]) -> list[str]:
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


def _nan_notes(subject: Subject, results: list[ArrangementResult], reference: Reference) -> list[str]:
    """Correct masks still give 0 * NaN, so NaN in padding is told, not judged."""
    right = next((r for r in results if r.name == "right padded" and r.verdict == "equal"), None)
    has_floats = any(subject.micro_batch(singles).fields[f.name].is_floating_point() for f in subject.fields
                     for singles in right.arrangement.pieces[:1]) if right else False  # fmt: skip
    if right is None or not has_floats:
        return []
    result = run_one(subject, right.arrangement.filled("nan"), reference)
    if result.verdict == "equal":
        return ["NaN in the padding does not reach the results either"]
    return ["NaN in the padding reaches the results (finite garbage does not: 0 * NaN is NaN): keep padding finite"]
