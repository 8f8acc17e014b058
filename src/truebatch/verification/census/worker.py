"""One architecture of the census: every layout put to the proof, and the proof to an independent check.

task -> tiny model -> choose_layout, every layout -> independent check on other samples -> a row of plain data
"""

from __future__ import annotations

import copy
import math
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from truebatch.errors import ConfigError, LawError, TruebatchError
from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.training.checks.rounding import StayInFp64
from truebatch.verification.census.media import MEDIA_HEADS, examine_media
from truebatch.verification.census.reference import (
    LENGTHS,
    SEED,
    Distance,
    Step,
    alone_logits,
    alone_step,
    distance,
    exact_copy,
    layout_step,
    outputs_distance,
    plain_layout,
    planted_leak,
)
from truebatch.verification.census.speed import how_packed, speed_of_packing
from truebatch.verification.choose_layout import ORDER, LayoutChoice, choose_layout, reason_against, try_layout
from truebatch.verification.config import VerifyConfig
from truebatch.verification.report import VerifyReport
from truebatch.verification.runner import prove
from truebatch.verification.subjects.hf_subject import hf_subject, random_samples

LEFT = "left padded"
LAYOUTS = (*ORDER, LEFT)
LIMIT = 1e-5
"""How far fp32 may be from one by one in any cell; half precision: twice as far from fp32 as one by one is."""
ROUNDING = 1e-3
"""Differences below this may be rounding, which fp64 tells from a fault."""
VANISHED = 1e-9
"""The most that is left in fp64 of a difference that is rounding; a fault stays what it is."""
VISIBLE = {torch.float32: 100.0, torch.bfloat16: 10.0}
"""How many tolerances a leak must move a sample by; a hundred of bf16, which has 8 bits, would be more than all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CensusTask:
    """One architecture with one head."""

    model_type: str
    head: str
    device: str = "cpu"
    dtype: str = "float32"
    is_quick: bool = False
    """Only the layout that is used, and those that were tried before it; not what transformers does by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Patient:
    """A model under examination, and what it says of samples alone."""

    model: nn.Module
    head: ModelHead
    samples: Sequence[Mapping[str, Any]]
    reference: Step
    limits: Distance
    typical: bool
    """Half precision: judged by typical cells, see `outputs_distance`."""


Build = Callable[[str, str], nn.Module]


def examine(task: CensusTask, build: Build = tiny_model) -> dict[str, Any]:
    """The row of one architecture. Whatever goes wrong is in it by name; nothing is raised."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # fp32 is meant
    begun = time.monotonic()
    row: dict[str, Any] = {"model_type": task.model_type, "head": task.head}
    try:
        row |= _examine(task, build)
    except ConfigError as error:
        row |= {"verdict": "not built", "why": _one_line(error.seen)}
    except Exception as error:  # a fault of the census itself must show as such in the table
        where = traceback.extract_tb(error.__traceback__)[-1]
        row |= {"verdict": "failed", "why": _one_line(f"{type(error).__name__}: {error} ({where.name}:{where.lineno})")}
    return {**row, "seconds": round(time.monotonic() - begun, 2)}


def _examine(task: CensusTask, build: Build) -> dict[str, Any]:
    model = build(task.model_type, task.head).to(task.device, getattr(torch, task.dtype))
    if task.head in MEDIA_HEADS:
        return examine_media(model)
    unfed = why_unfed(model)
    if unfed:
        return {"class": type(model).__name__, "verdict": "not fed", "why": unfed}
    head = head_of(model)
    choice, reasons = _choose(model)
    reports = {} if choice is None else dict(choice.reports)
    mode = reports[choice.layout].mode if choice is not None else "eval"
    try:
        patient = _admit(model, head, mode)
    except Exception as error:  # then there is nothing to compare with, and its user sees the same
        return {"class": type(model).__name__, **_without_reference(error, reasons)}
    asked = reports if task.is_quick else LAYOUTS
    layouts = {name: _layout(patient, name, reports.get(name)) for name in asked}  # type: ignore[call-overload]
    chosen = None if choice is None else choice.layout
    visible = _visibility(patient, reports, chosen)
    has_plain = task.head in PLAIN_HEADS and not task.is_quick
    return {
        "class": type(model).__name__,
        "fed": "text" if head.images is None else "text and images",
        "layouts": layouts,
        "chosen": chosen,
        **_verdict(layouts, chosen, reasons, visible),
        "mode": mode,
        "leak": visible,
        **({"how": how_packed(model, head), "speed": speed_of_packing(model, head)} if chosen == ORDER[0] else {}),
        "plain": {name: _plain(patient, name) for name in ("packed", LEFT)} if has_plain else {},
    }


PLAIN_HEADS = ("causal_lm", "masked_lm")
"""Heads for which transformers' own behaviour is shown too."""


def why_unfed(model: nn.Module) -> str:
    """Why no sample can be made for the model, or what it raises with one alone; an empty string if it runs."""
    try:
        samples = make_samples(model, LENGTHS[:2], SEED)
        with torch.no_grad():
            alone_logits(model, head_of(model), samples[0])
    except TruebatchError as error:
        return _one_line(f"{error.wrong}: {error.seen}")
    except Exception as error:  # it needs something that samples of its head do not have, and says what
        return _one_line(f"{type(error).__name__}: {error}")
    return ""


PLAIN_LIMIT = 1e-3
"""Rounding is not held against transformers: only what is wrong beyond doubt."""


def _without_reference(error: Exception, reasons: Mapping[str, str]) -> dict[str, Any]:
    if "no layout" in reasons:
        return {"verdict": "refused", "why": _one_line(reasons["no layout"])}
    return {"verdict": "not proven", "why": _one_line(f"some samples raise alone: {type(error).__name__}: {error}")}


def _choose(model: nn.Module) -> tuple[LayoutChoice | None, dict[str, str]]:
    try:
        choice = choose_layout(model)
    except LawError as error:
        return None, {"no layout": error.seen}
    except Exception as error:  # a model that raises alone: its user sees the same
        return None, {"no layout": f"raises {type(error).__name__}: {error}"}
    return choice, {str(name): why for name, why in choice.reasons.items()}


def _admit(model: nn.Module, head: ModelHead, mode: str) -> Patient:
    """The samples of the independent check, and what the model says of each alone."""
    model.train(mode == "train")
    samples = make_samples(model, LENGTHS * 2, SEED)
    one_by_one = alone_step(model, head, samples)
    if next(model.parameters()).dtype == torch.float32:
        return Patient(model, head, samples, one_by_one, Distance(LIMIT, LIMIT), typical=False)
    exact = alone_step(exact_copy(model), head, samples)
    far, eps = distance(one_by_one, exact, typical=True), torch.finfo(next(model.parameters()).dtype).eps
    limits = Distance(2 * max(far.outputs, eps), 2 * max(far.gradient, eps))
    return Patient(model, head, samples, exact, limits, typical=True)


def _layout(patient: Patient, layout: str, report: VerifyReport | None) -> dict[str, Any]:
    """What `verify` says of a layout; where it says equal, what the independent check says too."""
    try:
        found = report or _prove(patient, layout)
    except Exception as error:  # raised before any layout was run: loud, so never silently wrong
        why = error.wrong if isinstance(error, TruebatchError) else str(error)
        return {"verdict": "refused", "why": _one_line(f"{type(error).__name__}: {why}")}
    if found.refused or any(result.verdict == "raised" for result in found.results):
        return {"verdict": "refused", "why": _why_raised(found)}
    if not found.ok:
        verdict = "different" if found.is_broken else "not proven"
        return {"verdict": verdict, "why": _one_line(reason_against(found)), "farthest": _farthest(found)}
    check = _check(patient, layout)
    # The stricter of the two decides what the table says of a layout.
    why = "only the second check sees it" if check["verdict"] == "different" else check.get("why", "")
    verdict = {"equal": "equal", "different": "different", "raised": "refused"}[check["verdict"]]
    return {"verdict": verdict, "why": why, "proven": True, "farthest": _farthest(found), "check": check}


def _prove(patient: Patient, layout: str) -> VerifyReport:
    rows: Literal["block", "packed"] = "block" if layout == "packed under a dense mask" else "packed"
    subject = hf_subject(patient.model, random_samples(patient.model), packed_rows=rows)
    if layout == LEFT:
        return prove(subject, VerifyConfig(layout="left"))
    return try_layout(subject, layout, VerifyConfig())  # type: ignore[arg-type]


def _check(patient: Patient, layout: str) -> dict[str, Any]:
    """The independent check of one layout on other samples."""
    try:
        step = layout_step(patient.model, patient.head, patient.samples, layout)
    except Exception as error:  # raising is not silent: the layout is not usable for these samples, and says so
        return {"verdict": "raised", "why": _one_line(f"{type(error).__name__}: {error}")}
    far, limits = distance(step, patient.reference, typical=patient.typical), patient.limits
    if _is_within(far, limits):
        return {"verdict": "equal", **_numbers(far)}
    is_rounding, seen = _ask_fp64(patient, layout, step, far)
    return {"verdict": "equal" if is_rounding else "different", **_numbers(far), "fp64": seen}


def _is_within(far: Distance, limits: Distance) -> bool:
    return far.outputs <= limits.outputs and far.gradient <= limits.gradient


def _ask_fp64(patient: Patient, layout: str, step: Step, far: Distance) -> tuple[bool, dict[str, Any]]:
    """A little over the limit in fp32: does the difference vanish in fp64, or is one by one as far from fp64 itself?

    Some models round by more than fp32 usually does, alone too. A leak moves a sample a thousand times further, and
    it stays what it is in fp64. Whether it is rounding, and the numbers that say so.
    """
    if patient.typical or not (far.outputs < ROUNDING and far.gradient < ROUNDING):
        return False, {"why": "too far to be rounding"}
    try:
        model = _in_fp64(patient.model)
        with StayInFp64():
            exact = alone_step(model, patient.head, patient.samples)
            arranged = layout_step(model, patient.head, patient.samples, layout)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # then the limit of fp32 stands
        return False, {"why": _one_line(f"does not run in fp64: {type(error).__name__}: {error}")}
    left, alone, there = distance(arranged, exact), distance(patient.reference, exact), distance(step, exact)
    limits = Distance(2 * max(alone.outputs, LIMIT / 2), 2 * max(alone.gradient, LIMIT / 2))
    is_rounding = _is_within(left, Distance(VANISHED, VANISHED)) or _is_within(there, limits)
    names = {"left": left, "one by one from fp64": alone, "this layout from fp64": there}
    return is_rounding, {name: _numbers(one) for name, one in names.items()}


def _in_fp64(model: nn.Module) -> nn.Module:
    """The same model in fp64; experts one after another, because the kernel for all at once has no fp64."""
    exact = copy.deepcopy(model).double()
    if getattr(getattr(exact, "config", None), "_experts_implementation", None) is not None:
        exact.set_experts_implementation("eager")  # type: ignore[operator]
    return exact


def _numbers(far: Distance) -> dict[str, Any]:
    return {"outputs": _number(far.outputs), "gradient": _number(far.gradient)}


def _visibility(patient: Patient, reports: Mapping[Any, VerifyReport], chosen: str | None) -> dict[str, Any]:
    """How far a leak would move a sample, in tolerances: in `verify` (a changed sample) and in a planted leak."""
    with torch.no_grad():
        moved = planted_leak(patient.model, patient.head, patient.samples, typical=patient.typical)
    out = {
        "planted": _number(moved / patient.limits.outputs),
        "needed": VISIBLE[next(patient.model.parameters()).dtype],
    }
    if chosen is None:
        return out
    report = reports[chosen]
    return {**out, "seen_by_verify": _number(report.leak_visible / report.limits["outputs"])}


def _verdict(
    layouts: Mapping[str, Any], chosen: str | None, reasons: Mapping[str, str], visible: Mapping[str, Any]
) -> dict[str, Any]:
    """One word for the row, and why it is not `equal`."""
    if chosen is None:
        return {"verdict": "refused", "why": _one_line(reasons["no layout"])}
    check = layouts[chosen]["check"]
    if check["verdict"] == "different":
        why = f"{chosen} rows of other samples differ: outputs {check['outputs']}, gradient {check['gradient']}"
        return {"verdict": "wrong and not noticed", "why": why}
    if check["verdict"] == "raised":
        return {"verdict": "not proven", "why": f"{chosen} rows of other samples raise {check['why']}"}
    # In half precision the tolerance of `verify` is as wide as its worst cell; the second check is what sees a leak.
    watching = ("planted", "seen_by_verify") if visible["needed"] == VISIBLE[torch.float32] else ("planted",)
    seen = [visible[name] for name in watching]
    if not all(_as_float(value) >= visible["needed"] for value in seen):
        return {
            "verdict": "not proven",
            "why": f"a leak would move outputs by only {min(seen, key=_as_float)} tolerances",
        }
    if chosen == ORDER[0]:
        return {"verdict": "equal", "why": ""}
    return {"verdict": "fell back", "why": _one_line(reasons.get(ORDER[0], ""))}


def _plain(patient: Patient, layout: str) -> dict[str, Any]:
    """transformers by itself, without truebatch: nobody notices when it differs."""
    try:
        found = plain_layout(patient.model, patient.head, patient.samples[: len(LENGTHS)], layout)
    except Exception as error:  # whatever a model raises here is what its user would see
        return {"verdict": "raised", "why": _one_line(f"{type(error).__name__}: {error}")}
    far = outputs_distance(found, patient.reference.outputs[: len(found)], typical=patient.typical)
    return {
        "verdict": "equal" if far <= max(PLAIN_LIMIT, patient.limits.outputs) else "different",
        "outputs": _number(far),
    }


def _why_raised(report: VerifyReport) -> str:
    raised = next(result for result in report.results if result.verdict == "raised")
    return _one_line(raised.error.splitlines()[0] if raised.error else "it raises")


def _farthest(report: VerifyReport) -> Any:
    return _number(max((d.value for r in report.results for d in r.differences), key=_nan_last, default=math.nan))


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _number(value: float) -> float | str:
    """A number JSON can hold."""
    return float(f"{value:.3g}") if math.isfinite(value) else str(value)


def _as_float(value: float | str) -> float:
    return float(value)


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:240]
