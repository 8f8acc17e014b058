"""Results that are right but stand in another order: what belongs to one sample is given to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from truebatch.verification.compare import relative, scale_of
from truebatch.verification.report import ArrangementResult, Cause

CLOSE = 1e-5


def reordered(results: Iterable[ArrangementResult], alone: Mapping[str, Mapping[int, Tensor]]) -> Cause | None:
    """A cause if every sample that moved got exactly what another sample of its micro-batch gets alone."""
    for result in results:
        if result.verdict != "different" or result.whole is None or len(result.moved) < 2:
            continue
        for name, samples in result.whole.outputs.items():
            swapped = _owners(samples, alone.get(name, {}), result)
            if swapped:
                sample, owner = next(iter(swapped.items()))
                return Cause(
                    "results in another order",
                    f"in '{result.name}' sample {sample} gets what belongs to sample {owner}: the results are right, and stand "
                    "in another order than the samples",
                    "give them back in the order of the samples: undo the sort, or leave it to pack_sequence(..., "
                    "enforce_sorted=False)",
                )
    return None


def _owners(samples: Mapping[int, Tensor], alone: Mapping[int, Tensor], result: ArrangementResult) -> dict[int, int]:
    """Moved sample -> the sample beside it whose result it got; empty unless each of them got that of another one."""
    found: dict[int, int] = {}
    for piece in result.arrangement.pieces:
        ids = [int(i) for i in piece.rows.ids]
        for sample in (i for i in ids if i in result.moved):
            owner = next((i for i in ids if i != sample and i in alone and _is_same(samples[sample], alone[i])), None)
            if owner is None:
                return {}
            found[sample] = owner
    return found if len(set(found.values())) == len(found) else {}


def _is_same(value: Tensor, expected: Tensor) -> bool:
    return value.shape == expected.shape and relative(value, expected, scale_of([expected])) <= CLOSE
