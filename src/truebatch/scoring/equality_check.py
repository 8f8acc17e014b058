"""Check before a run: score a few samples alone and in batches, and refuse if results differ by more than noise.

finds right padding, an unused mask, positions of an earlier call, a batch that is a loop, mixed-up images
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from truebatch.errors import ConfigError, LawError
from truebatch.scoring.backends.interface import Backend, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.prefetch import attempt
from truebatch.scoring.runner import cost_all
from truebatch.training.memory.oom import is_out_of_memory

TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest allowed difference of a probability, by the dtype of the weights."""
MOST_ROUNDING = 2.0
"""In half precision a batch may be this many times as far from fp32 as a single sample, as for `truebatch verify`."""
_LOOP_SHARE = 0.9
_LEAST, _RAREST = 1e-9, 1e-30
_RARE = 0.02
"""A label's probability may differ by the tolerance, and by 50 times that relative to itself: rare ones count too."""


@dataclass(frozen=True, slots=True)
class LargestDifference:
    """A sample and its difference."""

    id: str
    difference: float
    alone: Any
    together: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityReport:
    """Result of scoring samples alone and in batches."""

    samples: int
    max_diff: float
    tolerance: float
    is_loop: bool
    """The model ran as often for the batch as for single samples: nothing is gained, and something may be wrong."""
    texts: int
    """Generated texts that were compared."""
    equal_texts: int
    worst: tuple[LargestDifference, ...]
    is_exact: bool
    """Whether texts must be equal: in fp32 yes, in half precision a near tie may go either way."""
    rounding: float | None = None
    """In half precision: the error of batches relative to fp32, divided by that of single samples; decides instead of
    `max_diff`."""

    @property
    def ok(self) -> bool:
        """True if batches may be used."""
        is_near = self.max_diff <= self.tolerance if self.rounding is None else self.rounding <= MOST_ROUNDING
        return is_near and not self.is_loop and (not self.is_exact or self.texts == self.equal_texts)

    def __str__(self) -> str:
        texts = f", {self.equal_texts}/{self.texts} texts equal" if self.texts else ""
        loop = ", the batch is a loop" if self.is_loop else ""
        word = "equal" if self.ok else "NOT equal"
        by = f"differ by {self.max_diff:.1e}, at most {self.tolerance:.0e} is noise"
        if self.rounding is not None:
            by = f"differ by {self.max_diff:.1e}; together {self.rounding:.2f} times as far from fp32, at most 2 is rounding"
        return f"{word}: {self.samples} samples alone and together {by}{texts}{loop}"


def check_identity(
    backend: Backend, samples: Sequence[ScoreRequest], *, n: int = 16, tolerance: float | None = None
) -> IdentityReport:
    """Score up to `n` samples of mixed cost alone, in batches, and alone again; compare results and probabilities.

    Samples that cannot be prepared are left out: they will be recorded as failures. The third pass detects state left
    by a call.
    """
    model = getattr(backend, "model", None)
    with _counted(model) as calls:
        chosen, alone = _sound(backend, choose_samples(backend, samples, n))
        prepared = [one for _, one in chosen]
        calls_alone = calls["n"]
        getattr(backend, "try_quick_ways", _nothing_to_try)(prepared)  # a trial of the model is no part of its batches
        calls["n"] = 0
        forced = [_followed(one) for one in alone]
        together = _all_together(backend, prepared, forced)
        calls_together = calls["n"]
    again = zip(prepared[::-1], forced[::-1], strict=True)
    after = [_judged(backend, [one], [given])[0] for one, given in again][::-1]
    limit = _tolerance(model) if tolerance is None else tolerance
    found = [
        LargestDifference(asked.id, max(_difference(a, b), _difference(a, c)), _shown(a), _shown(b))
        for (asked, _), a, b, c in zip(chosen, alone, together, after, strict=True)
    ]
    texts = [(a["text"], b["text"]) for a, b in zip(alone, together, strict=True) if "text" in a and "text" in b]
    return IdentityReport(
        samples=len(chosen), max_diff=max((one.difference for one in found), default=0.0), tolerance=limit,
        is_loop=len(chosen) > 2 and calls_together >= _LOOP_SHARE * calls_alone > 0, texts=len(texts),
        equal_texts=sum(a == b for a, b in texts), worst=tuple(sorted(found, key=lambda one: -one.difference)[:3]),
        is_exact=_is_exact(model),
        rounding=None if tolerance is not None else _rounding(backend, prepared, (alone, together, after), forced),
    )  # fmt: skip


def _nothing_to_try(_prepared: Sequence[Any]) -> None:
    """Most backends have one way."""


def pack_report(report: IdentityReport) -> dict[str, Any]:
    """A report as plain values, to send from the process that has the model."""
    return {**asdict(report), "worst": [asdict(one) for one in report.worst]}


def unpack_report(value: Mapping[str, Any]) -> IdentityReport:
    """The report again."""
    return IdentityReport(**{**value, "worst": tuple(LargestDifference(**one) for one in value["worst"])})


def refuse(report: IdentityReport) -> None:
    """Raise `LawError` if batches would change answers."""
    if report.ok:
        return
    worst = "; ".join(f"{one.id}: {one.alone} alone, {one.together} together" for one in report.worst[:2])
    raise LawError(
        "this model gives other results in a batch than alone",
        seen=f"{report}; {worst}",
        do="check padding, mask and positions (`truebatch verify` names the module), or score one by "
        "one with rows=1; set your own tolerance with check=0.05",
    )


def choose_samples(backend: Backend, samples: Sequence[ScoreRequest], n: int) -> list[ScoreRequest]:
    """Up to n samples from the cheapest to the most expensive."""
    pool = samples[:: max(1, len(samples) // (8 * n))][: 16 * n]
    costs = zip(pool, cost_all(backend, pool), strict=True)
    priced = [(cost, asked) for asked, cost in costs if not isinstance(cost, SampleError)]
    priced.sort(key=lambda one: one[0].tokens)
    step = max(1.0, (len(priced) - 1) / max(1, n - 1))
    return [priced[round(at * step)][1] for at in range(min(n, len(priced)))]


def _sound(
    backend: Backend, chosen: Sequence[ScoreRequest]
) -> tuple[list[tuple[ScoreRequest, Any]], list[dict[str, Any]]]:
    """The samples that can be scored alone, with their results; the others will be recorded as failures."""
    kept, answers = [], []
    for asked in chosen:
        one = attempt(backend.prepare, asked)
        if isinstance(one, SampleError):
            continue
        try:
            (answer,) = _judged(backend, [one])
        except ConfigError:
            raise
        except Exception:  # noqa: S112 (whatever a foreign model raises is recorded when this sample's batch is run)
            continue
        kept.append((asked, one))
        answers.append(answer)
    return kept, answers


def _all_together(backend: Backend, prepared: Sequence[Any], forced: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Results of one batch, split in two if it does not fit. A batch that raises has none and counts as different."""
    try:
        return _judged(backend, prepared, forced)
    except ConfigError:
        raise
    except Exception as error:  # a model that fails on batches is exactly what this check looks for
        is_memory = is_out_of_memory(error)
        kind = f"{type(error).__name__}: {str(error)[:200]}"
    if is_memory and len(prepared) > 1:
        middle = len(prepared) // 2
        first = _all_together(backend, prepared[:middle], forced[:middle])
        return first + _all_together(backend, prepared[middle:], forced[middle:])
    return [{"chances": None, "kind": kind} for _ in prepared]


def _judged(
    backend: Backend, prepared: Sequence[Any], forced: Sequence[Sequence[int]] | None = None
) -> list[dict[str, Any]]:
    """Everything to compare, per sample; after `forced` tokens where both must follow the same path."""
    if not prepared:
        return []
    out = []
    probe = getattr(backend, "probe", None)
    near = probe(prepared, forced) if probe is not None else [None] * len(prepared)
    for answer, chances in zip(backend.judge(prepared), near, strict=True):
        found: dict[str, Any] = {"chances": chances}
        if isinstance(answer, ScoreResponse):
            found |= {"score": answer.score, **answer.output}
        else:
            found |= {"kind": answer.kind, **answer.output}
        out.append(found)
    return out


def _followed(found: Mapping[str, Any]) -> list[int]:
    """The tokens that were forced when the model ran alone."""
    chances = found["chances"]
    return [] if chances is None or chances.ndim < 2 else [int(token) for token in chances[:-1].argmax(-1)]


def _rounding(
    backend: Any, prepared: Sequence[Any], ways: Sequence[Sequence[Mapping[str, Any]]], forced: Sequence[Sequence[int]]
) -> float | None:
    """How many times as far from fp32 the samples are together, or alone after that, as they were alone.

    All of them, by the root of all squares, and each, beside the one that is furthest alone, for which twice as much is
    allowed. None in full precision, and where there is no room for the weights in fp32.
    """
    if _is_exact(getattr(backend, "model", None)) or not hasattr(backend, "probe_in_fp32") or not prepared:
        return None
    try:
        exact = [backend.probe_in_fp32(one, given) for one, given in zip(prepared, forced, strict=True)]
    except Exception as error:  # memory runs out in errors of many classes
        if not is_out_of_memory(error):
            raise
        return None
    if any(one["chances"] is None for way in ways for one in way):
        return float("inf")
    far = [[_distance(one["chances"], true) for one, true in zip(way, exact, strict=True)] for way in ways]
    alone, largest = max(math.hypot(*far[0]), _LEAST), max(*far[0], _LEAST)
    return max(max(math.hypot(*way) / alone, max(way) / largest / MOST_ROUNDING) for way in far[1:])


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of logarithms of probabilities, where rounding is alike for likely and rare tokens; of a head's numbers as they
    are."""
    if exact.ndim > 1:
        found, exact = found.clamp(min=_RAREST).log(), exact.clamp(min=_RAREST).log()
    return float((found - exact).norm())


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference of two results: relative for numbers above 1, infinite for different kinds."""
    if one.get("kind") != other.get("kind"):
        return float("inf")
    if one["chances"] is not None:
        largest = float((one["chances"] - other["chances"]).abs().max() / max(1.0, float(one["chances"].abs().max())))
        if "text" in one:  # scores of texts follow from the texts, which are compared as such
            return largest
    else:
        largest = 0.0
    first, second = list(_numbers(one)), list(_numbers(other))
    if len(first) != len(second):
        return float("inf")
    ratios = [_RARE * abs(a - b) / max(a, b) for a, b in zip(*map(_chances, (one, other)), strict=True) if a != b]
    others = [abs(a - b) / max(1.0, abs(a)) for a, b in zip(first, second, strict=True)]
    return float(max([largest, *ratios, *others]))


def _chances(found: Mapping[str, Any]) -> list[float]:
    return list(found.get("probabilities", {}).values())


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _numbers(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _shown(found: Mapping[str, Any]) -> Any:
    return found.get("score") if found.get("score") is not None else found.get("text", found.get("kind"))


@contextmanager
def _counted(model: nn.Module | None) -> Iterator[dict[str, int]]:
    """Count the calls of a model and of its layers."""
    calls = {"n": 0}

    def count(*_: Any) -> None:
        calls["n"] += 1

    parts = [] if model is None else [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    hooks = [part.register_forward_hook(count) for part in parts]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _tolerance(model: nn.Module | None) -> float:
    return TOLERANCES.get(next(model.parameters()).dtype, 3e-2) if model is not None else 1e-6


def _is_exact(model: nn.Module | None) -> bool:
    return model is None or next(model.parameters()).dtype in (torch.float32, torch.float64)
