"""A second opinion on a Hugging Face model, slow and obvious: every sample alone, against a layout of truebatch.

Nothing here is shared with `proof`: the calls alone, the loss, the gradient and the comparison are written out again,
on other samples. It is what makes a wrong "equal" visible.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.collate import collate
from truebatch.batch.fields import Side
from truebatch.batch.microbatch import CELLS
from truebatch.hf.forward_inputs import TARGETS
from truebatch.hf.heads.heads import ModelHead
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.image_fields import forget_last_call, image_token_id, pixel_inputs
from truebatch.planning.rows import Rows, packed_row, padded_rows

LENGTHS = (4, 70, 11, 23, 37, 2, 18, 9)
"""Other lengths than `verify` makes up; the longest is beyond every window and chunk of a tiny model."""
SEED = 20_240

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a step of all samples gave."""

    outputs: list[Tensor]
    """One [n, V] for every sample, in the order of the samples."""
    gradient: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a step is from another, relative; NaN counts as infinitely far."""

    outputs: float
    """||a - b|| / ||b|| over the logits of a cell: of the worst one, or of a typical one."""
    gradient: float
    """||a - b|| / ||b|| over all parameters as one vector."""


def alone_step(model: nn.Module, head: ModelHead, samples: Sequence[Sample]) -> Step:
    """The step as a plain loop: call the model with one sample, add its loss up, divide once, differentiate."""
    outputs, total, count = [], None, 0
    for sample in samples:
        logits = alone_logits(model, head, sample)
        shown, labels = _answers(head, sample, logits)
        one = torch.nn.functional.cross_entropy(shown.float(), labels, ignore_index=-100, reduction="sum")
        total = one if total is None else total + one
        count += int((labels != -100).sum())
        outputs.append(logits.detach())
    assert total is not None
    return Step(outputs, _gradient(model, total / count))


def alone_logits(model: nn.Module, head: ModelHead, sample: Sample) -> Tensor:
    """[n, V]: what the model says of one sample, called as the documentation of transformers calls it."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    given: dict[str, Any] = {"use_cache": False}
    for field in head.fields:
        if field.name == "labels":
            continue
        value = torch.as_tensor(sample[field.key]).to(device)
        value = value.to(dtype) if value.is_floating_point() else value
        given[field.name] = value if field.kind == "flat" else value[None]
    given |= {} if head.images is None else pixel_inputs(head.images, given)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    return _call(model, head, {**given, **_image_types(model, head, given["input_ids"])})[0]


def _image_types(model: nn.Module, head: ModelHead, ids: Tensor) -> dict[str, Tensor]:
    """Where images are, as processors say it."""
    placeholder = image_token_id(model)
    if head.images is None or placeholder is None:
        return {}
    is_image = ids.eq(placeholder).long()
    return {"mm_token_type_ids": is_image, "token_type_ids": is_image}


def _call(model: nn.Module, head: ModelHead, given: Mapping[str, Any]) -> Tensor:
    forget_last_call(model)
    logits: Tensor = model(**{name: value for name, value in given.items() if name in head.border.accepts}).logits
    return logits


def _answers(head: ModelHead, sample: Sample, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that have an answer, and the answers."""
    labels = torch.as_tensor(sample["labels"]).to(logits.device)
    if any(field.name == "labels" and field.shift for field in head.fields):
        return logits[:-1], labels[1:]
    return logits, labels


def _gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def layout_step(model: nn.Module, head: ModelHead, samples: Sequence[Sample], layout: str) -> Step:
    """The same step as truebatch runs it in one of its layouts."""
    under_mask = layout == "packed under a dense mask"
    objective = HeadObjective(head=head, packed_rows="block" if under_mask else "packed")
    device = next(model.parameters()).device
    outputs: dict[int, Tensor] = {}
    total, count = torch.zeros((), device=device), 0
    for rows in rows_of(layout, [len(sample["input_ids"]) for sample in samples]):
        side: Side = "left" if layout == "left padded" else "right"
        batch = collate([samples[int(i)] for i in rows.ids], rows, head.fields, side=side).to(device)
        found, sums = objective.outputs_and_sums(model, batch)
        outputs |= {i: t.detach() for i, t in zip(batch.sample_ids, found["logits"], strict=True)}
        total = total + sums["nll"]
        count += objective.counts(batch)["nll"]
    return Step([outputs[i] for i in range(len(samples))], _gradient(model, total / count))


def rows_of(layout: str, lengths: Sequence[int]) -> list[Rows]:
    """The micro-batches of a step in this layout."""
    number = len(lengths)
    if layout.startswith("packed"):
        half = (number + 1) // 2
        parts = [np.arange(half)[::-1], np.arange(half, number)]
        return [packed_row(ids, sum(lengths[i] for i in ids)) for ids in parts if len(ids)]
    if layout == "grouped":
        groups = {n: [i for i in range(number) if lengths[i] == n] for n in lengths}
        return [padded_rows(np.array(ids), n) for n, ids in groups.items()]
    return [padded_rows(np.arange(number)[::-1], max(lengths))]


def distance(step: Step, reference: Step, *, typical: bool = False) -> Distance:
    """Cell by cell and over the whole gradient."""
    worst = outputs_distance(step.outputs, reference.outputs, typical=typical)
    gap = math.fsum(_square(step.gradient[n].double() - g.double()) for n, g in reference.gradient.items())
    size = math.fsum(_square(g.double()) for g in reference.gradient.values())
    return Distance(worst, _finite(math.sqrt(gap / size) if size else math.nan))


def outputs_distance(found: Sequence[Tensor], expected: Sequence[Tensor], *, typical: bool = False) -> float:
    """The worst cell of all samples. `typical` allows for chance: the typical cell of three samples in four.

    In half precision rounding alone sends a cell to another expert, and with it whatever attends to that cell. A leak
    moves all samples but the first of a row.
    """
    far = sorted(cell_distance(a, b, typical=typical) for a, b in zip(found, expected, strict=True))
    return far[(3 * len(far)) // 4 - 1] if typical and far[-1] < math.inf else far[-1]


def cell_distance(found: Tensor, expected: Tensor, *, typical: bool = False) -> float:
    """The worst cell of one sample: ||a - b|| / ||b|| over its logits; infinite for another shape or NaN.

    `typical` takes the median cell instead of the worst.
    """
    if found.shape != expected.shape:
        return math.inf
    a, b = found.double(), expected.double()
    same = torch.isinf(b) & (a == b)  # logits a model rules out are -inf in both
    gap = (a - b).masked_fill(same, 0.0).norm(dim=-1)
    size = b.masked_fill(same, 0.0).norm(dim=-1)
    far = gap / size.clamp_min(1e-12)
    return _finite(float(far.median() if typical and bool(far.isfinite().all()) else far.max()))


def _square(value: Tensor) -> float:
    return float(value.square().sum())


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def exact_copy(model: nn.Module) -> nn.Module:
    """The same model in fp32."""
    return copy.deepcopy(model).float()


def planted_leak(model: nn.Module, head: ModelHead, samples: Sequence[Sample], *, typical: bool = False) -> float:
    """How far a sample moves when a neighbour is laid before it as if both were one: what a leak looks like."""
    first, second = samples[0], samples[2]
    alone = alone_logits(model, head, second)
    joined = dict(second)
    for field in head.fields:
        if field.name not in ("labels", "decoder_input_ids"):
            joined[field.key] = torch.cat([torch.as_tensor(s[field.key]) for s in (first, second)])
    both = alone_logits(model, head, joined)[-len(alone) :]
    return cell_distance(both, alone, typical=typical)


def plain_layout(model: nn.Module, head: ModelHead, samples: Sequence[Sample], layout: str) -> list[Tensor]:
    """The outputs transformers gives by itself: packed rows with restarting positions, or left padding and a mask.

    With everything its processors would give: images and audio, and the padding token of its configuration.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    ids = np.arange(len(samples))
    rows = packed_row(ids, sum(lengths)) if layout == "packed" else padded_rows(ids, max(lengths))
    batch = collate(samples, rows, head.fields, side="left").to(next(model.parameters()).device)
    where = {"position_ids": batch.positions} if layout == "packed" else {"attention_mask": batch.is_real.long()}
    tokens = batch["input_ids"].masked_fill(~batch.is_real, padding_token_id(model))
    dtype = next(model.parameters()).dtype
    more = {f.name: batch[f.name] for f in head.fields if f.name not in ("labels", "input_ids")}
    more |= {} if head.images is None else pixel_inputs(head.images, batch.fields)
    more = {name: value.to(dtype) if value.is_floating_point() else value for name, value in more.items()}
    given = {**more, **_image_types(model, head, tokens), "input_ids": tokens, "use_cache": False, **where}
    has_decoder = "decoder_input_ids" in more
    with torch.no_grad():
        return batch.per_sample(_call(model, head, given), TARGETS if has_decoder else CELLS)


def padding_token_id(model: nn.Module) -> int:
    """What a tokenizer of this model pads with; 0 where its configuration does not say."""
    config: Any = getattr(model, "config", None)
    known = [
        getattr(c, "pad_token_id", None) for c in (config, config.get_text_config() if config is not None else None)
    ]
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    weight = None if embeddings is None else getattr(embeddings(), "weight", None)
    rows = len(weight) if isinstance(weight, Tensor) else math.inf
    fitting = [n for n in known if isinstance(n, int) and 0 <= n < rows]
    return fitting[0] if fitting else 0
