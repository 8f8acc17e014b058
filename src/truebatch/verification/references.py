"""What arrangements are compared with: one by one itself, in fp64 where rounding is large, in fp32 for half precision."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from truebatch.errors import ConfigError
from truebatch.training.checks.rounding import in_dtype, in_fp64
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import Arrangement
from truebatch.verification.compare import (
    PARTS,
    ROUNDING,
    Reference,
    Runnable,
    Whole,
    differences,
    floating_dtype,
    run_whole,
)
from truebatch.verification.config import TOLERANCES
from truebatch.verification.engines.rounding_noise import Rounding, rounded
from truebatch.verification.gradients import GradientRounding, measured_rounding

HALF_ROOM = 2.0
"""How many times as far from fp32 as the furthest rounded run of one by one a micro-batch in half precision may be."""
BLIND = 0.25
"""Where rounding alone may move outputs by this part of the largest, a fault has room to hide."""
FLIPPING = 10.0
"""Rounded runs that lie further apart than this ratio make choices by rounding, as routers of experts do."""
ROUNDED_RUNS = (1, 2, 3)
"""Seeds of them; a quick proof takes the first."""


def make_reference(subject: Runnable, one_by_one: Whole, alone: Arrangement, tolerance: float | None) -> Reference:
    """What others are compared with in fp32 and fp64, or with a tolerance: one by one itself."""
    dtype = floating_dtype(subject.model)
    limit = TOLERANCES.get(dtype, 1e-5) if tolerance is None else tolerance
    rounding = _rounding_of(subject, alone) if dtype in TOLERANCES else None
    return Reference(one_by_one, dict.fromkeys(PARTS, limit), rounding)


def refuse_without_fp32(subject: Runnable, alone: Arrangement) -> None:
    """Raise `ConfigError` where a model in half precision cannot be run in fp32."""
    assert subject.model is not None
    few = Arrangement(alone.name, alone.layout, alone.pieces[:1])
    dtype = floating_dtype(subject.model)
    try:
        with in_dtype(subject.model, torch.float32):
            run_whole(subject, few, gradient=False)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            "half precision is measured against fp32, and this model cannot be run in fp32",
            seen=f"a model in {dtype}; in fp32 it raises {type(error).__name__}: {error}",
            do="take the dtype from the model instead of writing it into the code, or give a tolerance",
        ) from error


def hidden_by_rounding(reference: Reference) -> str:
    """Why half precision cannot be judged, if rounding alone moves one by one by anything, or so far that all may hide."""
    least, most = min(reference.rounded, default=0.0), max(reference.rounded, default=0.0)
    if not (most > BLIND or (least > 0 and most / least > FLIPPING)):
        return ""
    return (
        f"in half precision one by one itself is {least:.1e} to {most:.1e} from fp32, as where rounding chooses other experts; "
        "in fp32 all is equal"
    )


def sharper_reference(subject: Runnable, one_by_one: Whole, alone: Arrangement) -> Reference | None:
    """The same model in fp64, for fp32 models whose own rounding is larger than what fp32 usually promises.

    Deep models with large activations round their gradients by more than that, one by one too. A micro-batch may then
    be at most twice as far from fp64 as one by one is; where fp64 cannot be run, None.
    """
    if subject.model is None or floating_dtype(subject.model) != torch.float32:
        return None
    try:
        found = _exact_reference(subject, one_by_one, alone, torch.float64, least=TOLERANCES[torch.float32] / 2)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        # as a model does with fp32 written into its code
        if is_out_of_memory(error):
            raise
        return None
    if any(limit > 2 * ROUNDING for limit in found.limits.values()):
        return None
    return replace(found, rounding=_rounding_of(subject, alone))


def _rounding_of(subject: Runnable, alone: Arrangement) -> GradientRounding | None:
    model = subject.model
    if model is None:
        return None

    def measure() -> dict[str, float]:
        base = run_whole(subject, alone).gradient
        return measured_rounding(model, lambda: run_whole(subject, alone).gradient, base)

    return GradientRounding(measure)


def _exact_reference(
    subject: Runnable, one_by_one: Whole, alone: Arrangement, dtype: torch.dtype, *, least: float
) -> Reference:
    assert subject.model is not None
    wider = in_fp64(subject.model) if dtype == torch.float64 else in_dtype(subject.model, dtype)
    with wider:
        exact = run_whole(subject, alone, gradient=bool(one_by_one.gradient))
    far = {d.part: d.value for d in differences(one_by_one, Reference(exact, dict.fromkeys(PARTS, math.inf)))}
    return Reference(exact, {part: 2 * max(far.get(part, 0.0), least) for part in PARTS})


def rounded_reference(
    subject: Runnable, one_by_one: Whole, alone: Arrangement, exact: Whole, *, quick: bool = False
) -> Reference:
    """Half precision: compared with one by one in fp32; one by one runs several times more, for the limits, each result of
    a module moved by up to a rounding."""
    assert subject.model is not None
    dtype = floating_dtype(subject.model)
    anything = Reference(exact, dict.fromkeys(PARTS, math.inf))
    far = [{d.part: d.value for d in differences(one_by_one, anything)}]
    for seed in ROUNDED_RUNS[:1] if quick else ROUNDED_RUNS:
        with rounded(subject.model, Rounding(dtype), seed):
            moved = run_whole(subject, alone, gradient=bool(one_by_one.gradient))
        far.append({d.part: d.value for d in differences(moved, anything)})
    least = torch.finfo(dtype).eps
    limits = {part: HALF_ROOM * max([least, *(one[part] for one in far if part in one)]) for part in PARTS}
    return Reference(exact, limits, rounded=tuple(one["outputs"] for one in far if "outputs" in one))
