"""One arrangement at a time: run it, compare it with the reference, and say what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from truebatch.errors import ConfigError, DataError
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import Arrangement
from truebatch.verification.compare import ROUNDING, Reference, Runnable, differences, run_whole, samples_over
from truebatch.verification.report import ArrangementResult, Verdict


def run_one(subject: Runnable, arrangement: Arrangement, reference: Reference) -> ArrangementResult:
    """Run one arrangement and judge it; whatever the model raises is its result."""
    try:
        whole = run_whole(subject, arrangement, gradient=bool(reference.whole.gradient))
        found = judge(ArrangementResult(arrangement, "equal", whole=whole), reference)
    except Exception as error:  # whatever a model raises is a result of this arrangement, reported by name
        if isinstance(error, ConfigError | DataError) or is_out_of_memory(error):
            raise
        return ArrangementResult(arrangement, "raised", error=f"{type(error).__name__}: {error}")
    if found.verdict == "different" and may_be_rounding([found]):
        return found
    return replace(found, whole=replace(whole, gradient={}))  # as large as the model, and not looked at again


def judge(result: ArrangementResult, reference: Reference) -> ArrangementResult:
    """The same run against a reference."""
    if result.whole is None:
        return result
    found = tuple(differences(result.whole, reference))
    verdict: Verdict = "different" if any(d.is_over for d in found) else "equal"
    return ArrangementResult(
        result.arrangement, verdict, found, frozenset(samples_over(result.whole, reference)), whole=result.whole
    )


def may_be_rounding(results: Sequence[ArrangementResult]) -> bool:
    """True if all that differs is so little that it may be the rounding of a deep model."""
    over = [d for r in results for d in r.differences if d.is_over]
    return bool(over) and all(d.value < ROUNDING for d in over)


def with_padding_noted(results: Sequence[ArrangementResult]) -> list[ArrangementResult]:
    """Padding of other values than declared is noted, not judged, where the declared ones are right.

    Planned batches hold the declared value; a model may find its padding by it (`ids != pad`).
    """
    plain = {r.name: r for r in results}
    return [_noted(r, plain) if r.arrangement.pieces[0].filling != "declared" else r for r in results]


def _noted(result: ArrangementResult, plain: Mapping[str, ArrangementResult]) -> ArrangementResult:
    twin = plain.get(result.name.partition(",")[0])
    if twin is None or twin.verdict != "equal" or result.verdict == "equal":
        return result
    return replace(result, verdict="note")
