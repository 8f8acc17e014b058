"""The ways of training that the benchmark compares: how each makes its micro-batches and runs one, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.training.workload import IGNORE, Part, Work
from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.torch_compile import compile_layers, has_compiled_layers, uncompile_layers
from truebatch.hf.attention.packed import use_packed_attention
from truebatch.hf.heads.lm_head import hidden_states_of, output_layer_of
from truebatch.hf.heads.losses import token_nll_in_chunks
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import longest_first, padded_rows
from truebatch.training.optim.grad_accumulation import batched_grad_accumulation, parameters_to_add

Run = Callable[[Any], None]
"""Forward and backward of one micro-batch."""
OWN = (
    "one by one", "HF default, 8", "HF group_by_length, 8", "HF packed, sdpa", "ours padded", "ours packed",
    "uniform", "uniform, our kernel", "ours packed, compiled", "uniform, compiled", "uniform, our kernel, compiled",
)  # fmt: skip
"""What needs no other library, in the order it runs in. A way and its limits are neighbours: the clock of a GPU drifts."""
EVERY_CASE = (
    "one by one", "HF default, 8", "HF group_by_length, 8", "ours packed", "uniform", "ours packed, compiled",
    "uniform, compiled",
)  # fmt: skip
"""The ways that every case has; the first case has all."""


EVEN = 64
"""Micro-batches of even rows that an epoch has: all the same, and enough for a round of whole steps."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """One row of the table."""

    name: str
    parts: Callable[[], Sequence[Part]]
    """The micro-batches of an epoch."""
    run: Run
    most: int = 4
    """Micro-batches of one timed round."""
    compiled: bool = False
    is_other: bool = False
    """Neither ours nor a limit of ours: two rounds are enough."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Open while this way runs."""
    together: str = ""
    """Neighbours with the same word here are timed in turns."""
    held_apart: int = 0
    """Bytes on the GPU that other ways need and this one does not: it has a model of its own."""


def all_ways(model: Any, work: Work, *, device: torch.device, backend: str) -> list[Way]:
    """Every way, the slowest first; what is compiled last."""
    theirs, ours = hf_step(model, device), _our_step(model, work, device)
    vocabulary = model.config.vocab_size
    packed: dict[str, Any] = {"around": lambda: use_packed_attention(model), "together": "as written"}
    uniform: dict[str, Any] = {
        "parts": lambda: [work.uniform(vocabulary)] * EVEN, "run": _uniform_step(model, device),
    }  # fmt: skip
    # A slow spell of a shared CPU should meet all ways alike; a GPU has not the time for it.
    in_turns: dict[str, Any] = {"together": "as written"} if device.type == "cpu" else {}
    other: dict[str, Any] = {"run": theirs, "is_other": True, **in_turns}
    compiled: dict[str, Any] = {"compiled": True, "together": "compiled"}
    both: dict[str, Any] = {**compiled, "around": lambda: _packed_and_compiled(model, backend)}
    return [
        Way(name="one by one", parts=lambda: work.chunks(1, by_length=False), most=16, **other),
        Way(name="HF default, 8", parts=lambda: work.chunks(8, by_length=False), most=6, **other),
        Way(name="HF group_by_length, 8", parts=lambda: work.chunks(8, by_length=True), most=8, **other),
        Way(name="HF packed, sdpa", parts=work.flattened, most=2, **{**other, "run": hf_packed_step(model, device)}),
        Way(name="ours padded", parts=work.budgeted, run=ours, **in_turns),
        Way(name="ours packed", parts=lambda: work.packed(is_static=False), run=ours, **packed),
        Way(name="uniform", together="as written", **uniform),
        Way(name="uniform, our kernel", parts=lambda: [work.even_packed(is_static=False)] * EVEN, run=ours, **packed),
        Way(name="ours packed, compiled", parts=lambda: work.packed(is_static=True), run=ours, **both),
        Way(name="uniform, compiled", around=lambda: _compiled(model, backend), **uniform, **compiled),
        Way(
            name="uniform, our kernel, compiled", parts=lambda: [work.even_packed(is_static=True)] * EVEN, run=ours,
            **both,
        ),
    ]  # fmt: skip


def _num_tokens(batch: MicroBatch) -> int:
    return sum(batch.rows().lengths)


def hf_step(model: Any, device: torch.device) -> Run:
    """What Hugging Face's Trainer does with a padded micro-batch: the model's own loss, all logits in fp32."""

    def run(batch: MicroBatch) -> None:
        ids = batch["input_ids"].to(device, non_blocking=True)
        labels = _unshifted(batch, model).to(device, non_blocking=True)
        real = batch.is_real.long().to(device, non_blocking=True)
        model(input_ids=ids, attention_mask=real, labels=labels, use_cache=False).loss.backward()

    return run


def hf_packed_step(model: Any, device: torch.device, **more: Any) -> Run:
    """A flattened row with positions that restart, from which transformers makes a dense mask; `more` for the model."""

    def run(batch: MicroBatch) -> None:
        ids = batch["input_ids"].to(device, non_blocking=True)
        labels = _unshifted(batch, model).to(device, non_blocking=True)
        positions = batch.positions.to(device, non_blocking=True)
        model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False, **more).loss.backward()

    return run


def _unshifted(batch: MicroBatch, model: Any) -> Tensor:
    """Labels in the place of their own token, as models of transformers expect them."""
    if "MaskedLM" in type(model).__name__:
        return batch["labels"]
    return torch.where(batch.is_real & (batch.positions > 0), batch["input_ids"], IGNORE)


def _our_step(model: Any, work: Work, device: torch.device) -> Callable[..., None]:
    objective, apart = HeadObjective(head=work.head), parameters_to_add(model, list(model.parameters()))

    def run(batch: MicroBatch, weight: float = 1.0) -> None:
        with without_cudnn_sdpa(device):  # as a step of training does it
            (total,) = objective.sums(model, batch.to(device, non_blocking=True)).values()
            with batched_grad_accumulation(apart):
                torch.autograd.backward(total * (weight / _num_tokens(batch)))

    return run


def _uniform_step(model: Any, device: torch.device) -> Run:
    """Even rows without a mask, with the same loss as ours: what remains is raggedness alone."""
    apart = parameters_to_add(model, list(model.parameters()))

    def run(batch: tuple[Tensor, Tensor, Tensor]) -> None:
        ids, labels, cells = (part.to(device, non_blocking=True) for part in batch)
        layer = output_layer_of(model, ids)
        assert layer is not None
        with hidden_states_of(layer) as seen:
            model(input_ids=ids, use_cache=False)
        is_compiled = has_compiled_layers(model)
        total = token_nll_in_chunks(layer, seen[0], labels, cells=cells, compiled=is_compiled)
        with batched_grad_accumulation(apart):
            torch.autograd.backward(total / labels.numel())

    return run


@contextmanager
def _compiled(model: Any, backend: str) -> Iterator[None]:
    compile_layers(model, backend=backend)
    try:
        yield
    finally:
        uncompile_layers(model)


@contextmanager
def _packed_and_compiled(model: Any, backend: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(use_packed_attention(model))
        stack.enter_context(_compiled(model, backend))
        yield


def compare_gradients(model: Any, work: Work, device: torch.device) -> dict[str, Any]:
    """How far the gradient of one packed row is from that of its samples one by one, as a share of its norm.

    In half precision two right ways differ by its noise; so beside it how far each is from one by one in fp32: a cut
    that is right is as far as one by one is. Gradients are added up in fp32. Of the samples that are farthest the length
    and the distance are named, for whoever has to explain it.
    """
    step = _our_step(model, work, device)
    rows = longest_first(work.rows[0], work.lengths[work.rows[0].ids])
    alone = [
        work.collate(padded_rows(rows.ids[i : i + 1], int(work.lengths[rows.ids[i]]))) for i in range(len(rows.ids))
    ]
    exact = copy.deepcopy(model).float()
    exactly = _our_step(exact, work, device)
    wanted = _gradient(exact, exactly, alone)
    one = _gradient(model, step, alone)
    far = []
    for batch in alone:
        rough, fine = _gradient(model, step, [batch]), _gradient(exact, exactly, [batch])
        far.append((int(_num_tokens(batch)), _distance(rough.values(), fine.values())))
    del exact, exactly, rough, fine
    packed = _gradient(model, step, [work.collate(rows)])
    with _whole_reductions():
        careful = _gradient(model, step, alone)
    return {
        "gradient": _distance(packed.values(), one.values()), "samples": len(alone),
        "packed to fp32": _distance(packed.values(), wanted.values()),
        "one by one to fp32": _distance(one.values(), wanted.values()),
        "one by one, products added up in fp32, to fp32": _distance(careful.values(), wanted.values()),
        "farthest samples": sorted(far, key=lambda one: -one[1])[:8],
    }  # fmt: skip


@contextmanager
def _whole_reductions() -> Iterator[None]:
    """A GPU may cut a product of few rows along its inner axis and add the parts in half precision; not in here."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def _gradient(model: Any, step: Callable[..., None], batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Of the mean over all tokens, added up in fp32."""
    total: dict[str, Tensor] = {}
    for batch in batches:
        model.zero_grad(set_to_none=True)
        step(batch, _num_tokens(batch) / sum(map(_num_tokens, batches)))
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total[name].add_(p.grad) if name in total else p.grad.float()
    model.zero_grad(set_to_none=True)
    return total


def _distance(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(found, wanted, strict=True)]
    apart, whole = (float(torch.stack(part).sum()) for part in zip(*squares, strict=True))
    return float((apart / whole) ** 0.5)
