"""The kernels for short samples beside attention written out, in a process of its own.

Triton decides when it is imported whether its kernels are compiled for a GPU or interpreted. Prints one JSON object:
the case -> relative distances of output, statistics and gradients, and whether what one sample holds stays in it.
"""

from __future__ import annotations

import json
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from truebatch.attention.triton_short import attend_short, differentiate_short, span_of_cells, try_out

GRAD = 3
"""Its place among query, key, value and the gradient of the output."""
CASES = {
    "one tile": ([5, 40, 1, 12], 4, 2, 16, True),
    "samples across tiles": ([130, 3, 40, 64, 64, 1, 200], 2, 1, 24, True),
    "both directions": ([130, 3, 40, 64, 64, 1, 70], 2, 2, 24, False),
    "narrow heads": ([7, 60], 2, 1, 8, False),
    "one sample of one cell": ([1], 2, 2, 16, True),
}


def parts_of(lengths: list[int], heads: int, key_heads: int, width: int, device: str) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output."""
    chance = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), n, width) for n in (heads, key_heads, key_heads, heads)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(shape, generator=chance).to(device, dtype) for shape in shapes]


def by_kernels(parts: list[torch.Tensor], lengths: list[int], causal: bool) -> list[torch.Tensor]:
    """Output, statistics and gradients; memory that no kernel writes holds NaN."""
    *given, grad = parts
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(grad.device)
    span = span_of_cells(starts, sum(lengths))
    out, *grads = (torch.full_like(part, torch.nan) for part in (parts[0], *given))
    stats = torch.full(parts[0].shape[:2], torch.nan, device=grad.device)
    rule = {"causal": causal, "scale": 0.3}
    attend_short(given, span, **rule, out=out, stats=stats)
    differentiate_short(grad, given, span, **rule, out=out, stats=stats, grads=grads)
    return [out, stats, *grads]


def by_hand(parts: list[torch.Tensor], lengths: list[int], causal: bool) -> list[torch.Tensor]:
    """The same in fp64, sample by sample."""
    *given, grad = (part.double() for part in parts)
    given = [part.requires_grad_() for part in given]
    outs, stats = [], []
    for pieces in zip(*(part.split(lengths) for part in given), strict=True):
        query, key, value = (piece.transpose(0, 1)[None] for piece in pieces)
        out = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.3, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        score = (query @ key.transpose(2, 3) * 0.3)[0].detach()
        hidden = torch.ones_like(score[0], dtype=torch.bool).triu(1) & causal
        stats.append(score.masked_fill(hidden, -torch.inf).logsumexp(-1).t())
    whole = torch.cat(outs)
    return [whole.detach(), torch.cat(stats), *torch.autograd.grad(whole, given, grad)]


def stays_inside(device: str, causal: bool) -> bool:
    """NaN and infinity in a sample, whichever part holds them: it is spoiled itself, and nobody else changes a bit."""
    lengths = [20, 9, 30, 80]
    clean = parts_of(lengths, 2, 1, 16, device)
    wanted = by_kernels(clean, lengths, causal)
    bad = slice(20, 29)
    others = [at for at in range(sum(lengths)) if not 20 <= at < 29]
    for which in range(4):
        for what in (torch.nan, torch.inf):
            parts = [part.clone() for part in clean]
            parts[which][bad.start + 4] = what
            found = by_kernels(parts, lengths, causal)
            if not all(torch.equal(one[others], other[others]) for one, other in zip(found, wanted, strict=True)):
                return False
            if all(bool(one[bad].isfinite().all()) for one in found):
                return False
            if which in (1, 2) and bool(found[0][bad].isfinite().all()):
                return False
            if which == GRAD and any(bool(one[bad].isfinite().all()) for one in found[2:]):
                return False
    return True


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, in fp64; where there is next to nothing, the distance itself."""
    return float((one.double() - other).norm() / other.norm().clamp(min=1.0))


def main() -> None:
    """All cases."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, object] = {}
    try_out(torch.device(device))
    for name, (lengths, heads, key_heads, width, causal) in CASES.items():
        parts = parts_of(lengths, heads, key_heads, width, device)
        both = zip(by_kernels(parts, lengths, causal), by_hand(parts, lengths, causal), strict=True)
        found[name] = [distance(one, other) for one, other in both]
    found["stays inside"] = [stays_inside(device, causal) for causal in (True, False)]
    found["device"] = device
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
