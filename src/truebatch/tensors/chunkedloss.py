"""Cross entropy from hidden states and the weight of an output layer, a chunk of cells at a time.

hidden [n, D] -> chunk -> logits [c, V] -> loss and both gradients of the chunk -> the logits are gone -> next chunk

The logits of all cells are the largest tensor of a language model's step; here only those of one chunk exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LOGITS_AT_ONCE = 2**28
"""Logits of one chunk at most; a chunk holds a power of two of cells, so that its shape is one of few."""
IGNORE = -100
"""Labels that count for nothing."""

_ChunkLoss = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitRule:
    """What a model does to the product of hidden states and weight before it calls it logits."""

    scale: float = 1.0
    """A factor on the logits."""
    softcap: float | None = None
    """logits -> softcap * tanh(logits / softcap)."""


def chunked_nll(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    rule: LogitRule | None = None,
    logits_at_once: int = LOGITS_AT_ONCE,
    compiled: bool = False,
) -> Tensor:
    """The negative log likelihood of `labels` [n], summed over those that are not -100; a number in fp32.

    Equal to cross entropy over `rule(hidden [n, D] @ weight[V, D].T + bias)`, with the softmax in fp32 and the gradient
    of the weight added up in fp32. The gradients are made in the forward pass, so the logits are computed once.
    `compiled` runs what happens to the logits of a chunk on a card as few compiled kernels.
    """
    hidden, weight, bias = _in_one_dtype(hidden, weight, bias)
    wants_grad = torch.is_grad_enabled()
    chunk = _cells_of_chunk(hidden.shape[0], weight.shape[0], logits_at_once)
    call = (rule or LogitRule(), chunk, compiled, wants_grad)
    total: Tensor = _ChunkedNll.apply(hidden, weight, bias, labels, call)  # type: ignore[no-untyped-call]
    return total


def _in_one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast does for a linear layer; the gradients come back in the dtype of each."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _cells_of_chunk(cells: int, vocabulary: int, logits_at_once: int) -> int:
    fitting = max(logits_at_once // max(vocabulary, 1), 1)
    return max(min(1 << (fitting.bit_length() - 1), cells), 1)


class _ChunkedNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: Any) -> Tensor:
        rule, chunk, compiled, wants_grad = call
        needs = [wants and wants_grad for wants in ctx.needs_input_grad[:3]]
        grads = _Grads.like(hidden, weight, bias, needs)
        chunk_loss = _compiled_chunk_loss() if compiled and hidden.is_cuda else _chunk_loss
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], chunk):
                end = min(begin + chunk, hidden.shape[0])
                logits = functional.linear(hidden[begin:end], weight, bias)
                logits = logits if rule.scale == 1.0 else logits * rule.scale
                part, grad = chunk_loss(logits, labels[begin:end], rule.softcap)
                total += part
                grads.add(grad if rule.scale == 1.0 else grad * rule.scale, hidden, weight, begin, end)
                del logits, grad  # or the next chunk would be made beside this one
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In fp32 first: rounded to half precision, the factor itself would be off for every cell in the same way.
        wide = (None if part is None else part.to(grad.dtype) * grad for part in ctx.saved_tensors)
        hidden, weight, bias = (None if part is None else part.to(ctx.dtype) for part in wide)
        return hidden, weight, bias, None, None


@dataclass(slots=True)
class _Grads:
    """The gradients of one call, None where nobody asks for them."""

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
    # In place: a chunk of logits is large, and nobody needs what is written over.
    grad = log_p.exp_().scatter_add_(1, at, torch.full_like(log_p[:, :1], -1.0)).mul_(counts[:, None])
    grad = grad if slope is None else grad.mul_(slope)
    return total, grad.to(logits.dtype)


@cache
def _compiled_chunk_loss() -> _ChunkLoss:
    compiled: _ChunkLoss = torch.compile(_fused_chunk_loss, dynamic=False)
    return compiled


def _fused_chunk_loss(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The same as `_chunk_loss`, written without a scatter, so that a compiler makes few passes over the logits."""
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
