"""Cross entropy from hidden states and the output layer's weight, one chunk of cells at a time.

hidden [n, D] -> cells with a label -> chunk -> logits [c, V] -> loss and both gradients -> the logits are gone -> next

The logits of all cells are the largest tensor of a language model's step; here only those of one chunk exist, and where
the host knows which cells have a label, none of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from truebatch.batch.torch_compile import BACKEND
from truebatch.errors import BatchError

LOGITS_AT_ONCE = 2**28
"""Logits of one chunk at most; a chunk holds a power of two of cells, so that its shape is one of few."""
IGNORE = -100
"""The label of cells that do not count."""
MOST_PICKED = 7 / 8
"""When a larger share of cells has a label, selecting them costs more than it saves."""
VOCABULARY_STEP = 8
"""Matrix products in half precision run at full speed when the number of columns is a multiple of this."""

_ChunkLoss = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitRule:
    """What a model does to hidden states times weight before the result is logits."""

    scale: float = 1.0
    """A factor applied to the logits."""
    softcap: float | None = None
    """logits -> softcap * tanh(logits / softcap)."""


def chunked_nll(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    cells: Tensor | None = None,
    bias: Tensor | None = None,
    rule: LogitRule | None = None,
    logits_at_once: int = LOGITS_AT_ONCE,
    compiled: bool = False,
) -> Tensor:
    """The negative log likelihood of `labels` [n], summed over those that are not -100; a number in fp32.

    Equal to cross entropy over `rule(hidden [n, D] @ weight[V, D].T + bias)`, with the softmax in fp32 and the gradient
    of the weight added up in fp32. The gradients are made in the forward pass, so the logits are computed once. `cells`
    [m]: those whose label is not -100, if known without a device sync (`MicroBatch.filled_cells`): if they are few
    enough, no logits are computed for the others. Values in cells without a label, even NaN, reach neither the sum nor
    a gradient. `compiled` fuses what is done to a chunk's logits on a GPU into a few compiled kernels.
    """
    if labels.shape != hidden.shape[:1]:
        raise BatchError(
            "every cell needs a label; -100 where there is none",
            seen=f"hidden states {tuple(hidden.shape)}, labels {tuple(labels.shape)}",
            do="give the labels the same cells as the model's output",
        )
    hidden, weight, bias = _in_one_dtype(hidden, weight, bias)
    if cells is not None and len(cells) > MOST_PICKED * len(hidden):
        cells = None
    number = len(hidden) if cells is None else len(cells)
    call = _LossCall(
        rule=rule or LogitRule(), chunk=_cells_of_chunk(number, weight.shape[0], logits_at_once), compiled=compiled,
        wants_grad=torch.is_grad_enabled(),
    )  # fmt: skip
    if weight.device.type == "cpu" and call.chunk >= number and number < weight.shape[1]:
        return _nll_of_few(hidden, weight, bias, labels, cells, call.rule)
    total: Tensor = _ChunkedNll.apply(hidden, weight, bias, labels, cells, call)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class _LossCall:
    """The arguments of one call other than tensors."""

    rule: LogitRule
    chunk: int
    """Cells of a chunk."""
    compiled: bool
    wants_grad: bool


def _in_one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast does for a linear layer; each gradient has the dtype of its input."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _cells_of_chunk(cells: int, vocabulary: int, logits_at_once: int) -> int:
    fitting = max(logits_at_once // max(vocabulary, 1), 1)
    return max(min(1 << (fitting.bit_length() - 1), cells), 1)


def _wide_vocabulary(weight: Tensor, bias: Tensor | None, rule: LogitRule) -> tuple[Tensor, Tensor | None]:
    """Weight and bias padded to a multiple of `VOCABULARY_STEP`, with tokens of zero probability.

    Matrix products for a vocabulary of 50257 or 30522 tokens take several times as long as for one a few tokens larger.
    """
    missing = -weight.shape[0] % VOCABULARY_STEP
    if not missing or not _is_worth_widening(weight) or rule.softcap is not None or rule.scale <= 0:
        return weight, bias
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return functional.pad(weight, (0, 0, 0, missing)), functional.pad(bias, (0, missing), value=float("-inf"))


def _is_worth_widening(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


class _ChunkedNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        cells: Tensor | None,
        call: _LossCall,
    ) -> Tensor:
        rule, chunk = call.rule, call.chunk
        ctx.dtype, ctx.num_cells = weight.dtype, hidden.shape[0]
        words = weight.shape[0]
        weight, bias = _wide_vocabulary(weight, bias, rule)
        hidden, labels = _picked(hidden, labels, cells)
        if weight.shape[0] > words:  # a label outside the vocabulary must stay outside, and be rejected as before
            labels = torch.where(labels < words, labels, labels + VOCABULARY_STEP)
        needs = [wants and call.wants_grad for wants in ctx.needs_input_grad[:3]]
        grads = _Grads.like(hidden, weight, bias, needs)
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        chunk_loss = _chunk_loss_for(call, hidden, is_picked=cells is not None)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], chunk):
                end = min(begin + chunk, hidden.shape[0])
                logits = functional.linear(hidden[begin:end], weight, bias)
                logits = logits if rule.scale == 1.0 else logits * rule.scale
                part, grad = chunk_loss(logits, labels[begin:end], rule.softcap)
                total += part
                grads.add(grad if rule.scale == 1.0 else grad * rule.scale, hidden, weight, begin, end)
                del logits, grad  # or two chunks would be in memory at once
        of_weight, of_bias = (None if part is None else part[:words] for part in (grads.weight, grads.bias))
        ctx.save_for_backward(grads.hidden, of_weight, of_bias, cells)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In fp32 first: rounded to half precision, the factor itself would be off for every cell in the same way.
        *parts, cells = ctx.saved_tensors
        wide = (None if part is None else part.to(grad.dtype) * grad for part in parts)
        hidden, weight, bias = (None if part is None else part.to(ctx.dtype) for part in wide)
        if hidden is not None and cells is not None:
            hidden = hidden.new_zeros(ctx.num_cells, hidden.shape[1]).index_copy_(0, cells, hidden)
        return hidden, weight, bias, None, None, None


def _nll_of_few(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cells: Tensor | None, rule: LogitRule
) -> Tensor:
    """`chunked_nll` for fewer cells than a hidden state has numbers: their logits are smaller than the weight, so it is the
    gradient of the weight that must not be gone through more often than it has to be."""
    hidden, labels = _picked(hidden, labels, cells)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = functional.linear(hidden, weight, bias)
        logits = logits if rule.scale == 1.0 else logits * rule.scale
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        return functional.cross_entropy(scores, labels, ignore_index=IGNORE, reduction="sum")


def _picked(hidden: Tensor, labels: Tensor, cells: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cells with a label; where they are not picked out, the hidden states of all others are zero."""
    if cells is not None:
        return hidden.index_select(0, cells), labels.index_select(0, cells)
    return hidden.masked_fill((labels == IGNORE)[:, None], 0.0), labels


@dataclass(slots=True)
class _Grads:
    """The gradients of one call, None where they are not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def like(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> _Grads:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return cls(
            torch.empty_like(hidden) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None,
        )

    def add(self, grad: Tensor, hidden: Tensor, weight: Tensor, begin: int, end: int) -> None:
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[begin:end])
        if self.weight is not None:
            self.weight += grad.t() @ hidden[begin:end]
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)


def _chunk_loss(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The loss of a chunk and its gradient with respect to `logits` [c, V], in the dtype of the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores, slope = logits, None
    if softcap is not None:
        bent = torch.tanh(logits.to(wide) / softcap)
        scores, slope = bent * softcap, 1 - bent.square()
    log_p = torch.log_softmax(scores, dim=-1, dtype=wide)
    counts = labels != IGNORE
    at = torch.where(counts, labels, 0)[:, None]
    total = -torch.where(counts, log_p.gather(1, at)[:, 0], 0).sum()
    # In place: a chunk of logits is large, and the overwritten values are not needed.
    grad = log_p.exp_().scatter_add_(1, at, torch.full_like(log_p[:, :1], -1.0)).mul_(counts[:, None])
    grad = grad if slope is None else grad.mul_(slope)
    return total, grad.to(logits.dtype)


def _chunk_loss_for(call: _LossCall, hidden: Tensor, *, is_picked: bool) -> _ChunkLoss:
    if not (call.compiled and hidden.is_cuda):
        return _chunk_loss
    return _compiled_for_any_number if is_picked else _compiled_chunk_loss()


@cache
def _compiled_chunk_loss() -> _ChunkLoss:
    compiled: _ChunkLoss = torch.compile(_fused_chunk_loss, dynamic=False, backend=BACKEND)
    return compiled


def _compiled_for_any_number(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Compiled once for chunks of any number of cells."""
    for part in (logits, labels):
        torch._dynamo.maybe_mark_dynamic(part, 0)
    return _compiled_any_chunk_loss()(logits, labels, softcap)


@cache
def _compiled_any_chunk_loss() -> _ChunkLoss:
    def any_chunk_loss(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
        return _fused_chunk_loss(logits, labels, softcap)

    compiled: _ChunkLoss = torch.compile(any_chunk_loss, backend=BACKEND)
    return compiled


def _fused_chunk_loss(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The same as `_chunk_loss`, written without a scatter, so that the compiler needs few passes over the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(wide)
    slope: Tensor | float = 1.0
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = bent * softcap, 1 - bent.square()
    counts = labels != IGNORE
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_label = columns == torch.where(counts, labels, -1)[:, None]
    normaliser = torch.logsumexp(scores, dim=-1, keepdim=True)
    at = torch.where(counts, labels, 0)[:, None]
    own = scores.gather(1, at)
    total = torch.where(counts, (normaliser - own)[:, 0], 0).sum()
    grad = (torch.exp(scores - normaliser) - is_label.to(wide)) * counts[:, None] * slope
    return total, grad.to(logits.dtype)
