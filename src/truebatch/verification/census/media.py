"""Recordings, images with texts and series in the census: samples as a processor pads them, against each alone.

tiny model -> samples that it takes -> `verify` on what several give together -> an independent check on other samples
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.media_samples import MediaInputs, Sample, media_inputs
from truebatch.training.memory.oom import first_line
from truebatch.verification.census.reference import Distance, Step, cell_distance, distance
from truebatch.verification.config import VerifyConfig
from truebatch.verification.outputs import named_tensors
from truebatch.verification.report import VerifyReport
from truebatch.verification.runner import prove
from truebatch.verification.subjects.function_subject import ListSubject

MEDIA_HEADS = (
    "speech_ctc", "speech_seq2seq", "audio_classification", "audio_language", "image_and_text", "time_series"
)  # fmt: skip
LENGTHS = (3, 9, 5, 14)
OTHER_LENGTHS = (4, 11, 2, 7)
LIMIT, ROUNDING, VANISHED = 1e-5, 1e-3, 1e-9
"""In fp32; differences that may be rounding; the most that is left of rounding in fp64."""
SEEDS = (0, 1)
_PER_SAMPLE = ("logits", "text_embeds", "image_embeds", "mean_predictions", "prediction_outputs", "regression_outputs",
               "prediction_logits")  # fmt: skip
"""Results that belong to one sample each; scores of all pairs do not."""
PACKED, PADDED, GROUPED = "packed", "padded", "grouped"
NOT_PACKED = "recordings, images and series are not laid end to end in a row"


def examine_media(model: nn.Module) -> dict[str, Any]:
    """The row of a model that reads recordings, images or series: padded rows, and groups of one size."""
    model.eval()
    try:
        inputs, others = (
            media_inputs(model, lengths, seed) for lengths, seed in zip((LENGTHS, OTHER_LENGTHS), SEEDS, strict=True)
        )
        names = _outputs(model, inputs.together(inputs.samples[:1]), 1).keys()
    except ConfigError as error:
        return {"class": type(model).__name__, "verdict": "not fed", "why": error.seen}
    if not names:
        return {"class": type(model).__name__, "verdict": "not fed", "why": "no result that belongs to one sample"}
    layouts = {} if _is_of_one_size(inputs) else {PADDED: _padded(model, inputs, others)}
    layouts[GROUPED] = _grouped(model, others, media_inputs(model, OTHER_LENGTHS, SEEDS[1] + 1))
    chosen = next((name for name in layouts if layouts[name]["verdict"] == "equal"), None)
    return {
        "class": type(model).__name__,
        "fed": _fed(inputs),
        "layouts": {PACKED: {"verdict": "refused", "why": NOT_PACKED}, **layouts},
        "chosen": chosen,
        **_verdict(layouts, chosen),
        "mode": "eval",
        "leak": {"planted": _number(_own_move(model, others) / LIMIT)},
    }


def _verdict(layouts: Mapping[str, Mapping[str, Any]], chosen: str | None) -> dict[str, Any]:
    if chosen is None:
        return {"verdict": "refused", "why": f"not even samples of one size are equal: {layouts[GROUPED]['why']}"}
    if PADDED not in layouts:
        return {"verdict": "fell back", "why": "all samples have one size, so nothing is padded"}
    why = layouts[PADDED].get("why", "")
    return {"verdict": "fell back", "why": NOT_PACKED if chosen == PADDED else f"padded rows differ: {why}"}


def _is_of_one_size(inputs: MediaInputs) -> bool:
    return all(len({sample[name].shape for sample in inputs.samples}) == 1 for name in inputs.samples[0])


def _fed(inputs: MediaInputs) -> str:
    form = inputs.form
    size = "of one length" if form.cells else "of several lengths"
    return f"{form.name} as {form.layout} {size}"


def _padded(model: nn.Module, inputs: MediaInputs, others: MediaInputs) -> dict[str, Any]:
    """What `verify` says of padded samples; where it says equal, what the independent check says too."""
    try:
        subject = ListSubject(inputs.samples, lambda many: _by_sample(model, inputs, many), model)
        report = prove(subject, VerifyConfig())
    except Exception as error:  # what cannot be asked is not used
        return {"verdict": "refused", "why": f"{type(error).__name__}: {first_line(error)}"}
    if not report.ok:
        return {"verdict": "different" if report.is_broken else "not proven", "why": _why(report)}
    return {"proven": True, **_checked(model, others, [list(reversed(range(len(others.samples))))])}


def _grouped(model: nn.Module, inputs: MediaInputs, twins: MediaInputs) -> dict[str, Any]:
    """Pairs of one size: each sample beside another with the same shapes."""
    both = MediaInputs(inputs.form, inputs.takes, [*inputs.samples, *twins.samples])
    number = len(inputs.samples)
    return _checked(model, both, [[at, at + number] for at in range(number)])


def _checked(model: nn.Module, inputs: MediaInputs, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    try:
        far = _far(model, inputs, groups)
        if not _is_within(far) and far.outputs < ROUNDING and far.gradient < ROUNDING:
            exact = _far(copy.deepcopy(model).double(), _in_fp64(inputs), groups)
            far = (
                exact
                if _is_within(Distance(exact.outputs / VANISHED * LIMIT, exact.gradient / VANISHED * LIMIT))
                else far
            )
    except Exception as error:  # raising is not silent: the layout is not usable, and says so
        return {"verdict": "refused", "why": f"{type(error).__name__}: {first_line(error)}"}
    check = {"outputs": _number(far.outputs), "gradient": _number(far.gradient)}
    is_equal = _is_within(far)
    why = "" if is_equal else f"outputs {check['outputs']}, gradient {check['gradient']} from one by one"
    check |= {"verdict": "equal" if is_equal else "different"}
    return {"verdict": "equal" if is_equal else "different", "why": why, "check": check}


def _far(model: nn.Module, inputs: MediaInputs, groups: Sequence[Sequence[int]]) -> Distance:
    return distance(_step(model, inputs, groups), _step(model, inputs, [[i] for i in range(len(inputs.samples))]))


def _in_fp64(inputs: MediaInputs) -> MediaInputs:
    samples = [{k: v.double() if v.is_floating_point() else v for k, v in s.items()} for s in inputs.samples]
    return MediaInputs(inputs.form, inputs.takes, samples)


def _is_within(far: Distance) -> bool:
    return far.outputs <= LIMIT and far.gradient <= LIMIT


def _step(model: nn.Module, inputs: MediaInputs, groups: Sequence[Sequence[int]]) -> Step:
    """Outputs of every sample, cut to the size they have alone, and the gradient of a random projection of them."""
    model.zero_grad(set_to_none=True)
    outputs: dict[int, Tensor] = {}
    for group in groups:
        found = _outputs(model, inputs.together([inputs.samples[i] for i in group]), len(group))
        loss = torch.zeros(())
        for at, i in enumerate(group):
            with torch.no_grad():
                alone = _outputs(model, inputs.together([inputs.samples[i]]), 1)
            parts = [_cut(found[name][at], alone[name][0]) for name in alone]
            draw = torch.Generator().manual_seed(i)
            loss = loss + sum((part * torch.randn(part.shape, generator=draw).to(part)).sum() for part in parts)
            outputs[i] = torch.cat([part.detach().flatten() for part in parts])[None]
        loss.backward()  # type: ignore[no-untyped-call]
    gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Step([outputs[i] for i in sorted(outputs)], gradient)


def _cut(value: Tensor, alone: Tensor) -> Tensor:
    """The first cells, as many as the sample has alone."""
    return value[: len(alone)] if value.ndim and value.shape[1:] == alone.shape[1:] else value


def _outputs(model: nn.Module, given: Mapping[str, Any], number: int) -> dict[str, Tensor]:
    found = named_tensors(model(**given))
    named = {name.removeprefix("output."): value for name, value in found.items()}
    return {name: value for name, value in named.items() if name in _PER_SAMPLE and value.ndim and len(value) == number}


def _by_sample(model: nn.Module, inputs: MediaInputs, many: Sequence[Sample]) -> dict[str, Tensor]:
    return _outputs(model, inputs.together(many), len(many))


def _own_move(model: nn.Module, inputs: MediaInputs) -> float:
    """How far a sample's results move when the first half of its recording is another: how visible a leak would be."""
    sample, name = inputs.samples[0], inputs.form.name
    changed = sample[name].clone()
    half = changed[: max(1, len(changed) // 2)]
    half.copy_(half.flip(0) + 0.5)
    with torch.no_grad():
        before, after = (_outputs(model, inputs.together([one]), 1) for one in (sample, {**sample, name: changed}))
    return max(cell_distance(after[n].flatten()[None], before[n].flatten()[None]) for n in before)


def _why(report: VerifyReport) -> str:
    if report.causes:
        return report.causes[0].words[:200]
    return (report.unproven or "it differs")[:200]


def _number(value: float) -> float | str:
    return float(f"{value:.2e}") if math.isfinite(value) else str(value)
