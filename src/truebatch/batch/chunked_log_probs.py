"""Log-probabilities of tokens from hidden states and the output layer's weight, one chunk of cells at a time.

hidden [n, D], labels [n] -> chunk -> logits [c, V] -> log-probability and entropy of each cell -> the logits are gone

Backward makes the logits of a chunk once more, with the gradient that each log-probability and each entropy got.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from truebatch.batch.chunked_cross_entropy import LOGITS_AT_ONCE, LogitRule
from truebatch.errors import BatchError


class TokenLogProbs(NamedTuple):
    """One number for each cell, in fp32 or better."""

    log_probs: Tensor
    """[n] of the labels."""
    entropy: Tensor
    """[n] of the whole distribution."""


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    rule: LogitRule | None = None,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> TokenLogProbs:
    """Log-probability of `labels` [n] and entropy under `softmax(rule(hidden [n, D] @ weight[V, D].T + bias) / temperature)`.

    >>> import torch
    >>> from truebatch.batch.chunked_log_probs import chunked_log_probs
    >>> found = chunked_log_probs(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]))
    >>> found.log_probs.exp().tolist()
    [0.25, 0.25]
    """
    if labels.shape != hidden.shape[:1]:
        raise BatchError(
            "every cell needs a label",
            seen=f"hidden states {tuple(hidden.shape)}, labels {tuple(labels.shape)}",
            do="give one label for each hidden state",
        )
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    parts = (hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    cells = max(logits_at_once // max(weight.shape[0], 1), 1)
    call = _Call(rule or LogitRule(), temperature, cells)
    with torch.autocast(kind, enabled=False):
        return TokenLogProbs(*_ChunkedLogProbs.apply(*parts, labels, call))  # type: ignore[no-untyped-call]


class _Call(NamedTuple):
    rule: LogitRule
    temperature: float
    cells: int
    """Of one chunk."""


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        found = [torch.empty(len(hidden), dtype=exact, device=hidden.device) for _ in range(3)]
        for begin in range(0, len(hidden), call.cells):
            some = slice(begin, begin + call.cells)
            scores = _scores(hidden[some], weight, bias, call, exact)[0]
            total = torch.logsumexp(scores, dim=-1)
            own = scores.gather(1, labels[some, None])[:, 0]
            mean = (torch.exp(scores - total[:, None]) * scores).sum(-1)
            for whole, part in zip(found, (own - total, total - mean, total), strict=True):
                whole[some] = part
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, found[1], found[2])
        ctx.call = call
        return found[0], found[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, totals = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=totals.dtype) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=totals.dtype) if bias is not None and needs[2] else None
        for begin in range(0, len(hidden), ctx.call.cells):
            some = slice(begin, begin + ctx.call.cells)
            scores, slope = _scores(hidden[some], weight, bias, ctx.call, totals.dtype)
            log_p = scores.sub_(totals[some, None])
            given = (None if part is None else part[some, None].to(log_p.dtype) for part in (of_log_probs, of_entropy))
            grad = _of_scores(log_p, labels[some, None], entropy[some, None], *given)
            grad = (grad if isinstance(slope, float) and slope == 1 else grad.mul_(slope)).to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(grad, weight, out=of_hidden[some])
            if of_weight is not None:
                of_weight += grad.t() @ hidden[some]
            if of_bias is not None:
                of_bias += grad.sum(0, dtype=of_bias.dtype)
        narrow = (None if part is None else part.to(hidden.dtype) for part in (of_weight, of_bias))
        return (of_hidden, *narrow, None, None)


def _of_scores(
    log_p: Tensor, labels: Tensor, entropy: Tensor, of_log_probs: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """The gradient of the scores [c, V]; `log_p` is overwritten. Most losses ask nothing of the entropy."""
    if of_entropy is None:
        grad = log_p.exp_()
        if of_log_probs is None:
            return grad.zero_()
        grad = grad.mul_(-of_log_probs)
    else:
        grad = (log_p + entropy).mul_(of_entropy)
        grad = (grad if of_log_probs is None else grad.add_(of_log_probs)).mul_(log_p.exp_()).neg_()
    return grad if of_log_probs is None else grad.scatter_add_(1, labels, of_log_probs)


def _scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, exact: torch.dtype
) -> tuple[Tensor, Tensor | float]:
    """The logits over the temperature, and their derivative by what the linear layer gives."""
    logits = functional.linear(hidden, weight, bias).to(exact)
    logits = logits if call.rule.scale == 1 else logits * call.rule.scale
    cap, slope = call.rule.softcap, call.rule.scale / call.temperature
    if cap is None:
        return logits if call.temperature == 1 else logits.div_(call.temperature), slope
    bent = torch.tanh(logits / cap)
    return bent * (cap / call.temperature), (1 - bent.square()) * slope
