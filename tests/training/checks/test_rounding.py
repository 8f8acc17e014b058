"""The same step in wider numbers."""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from truebatch.training.checks.rounding import StayInFp64

CELLS = 64


def gradients(parts, *, causal):
    parts = [part.clone().requires_grad_() for part in parts]
    scaled_dot_product_attention(*parts, is_causal=causal).square().sum().backward()
    return [part.grad for part in parts]


def test_attention_in_fp64_keeps_nothing_for_every_pair_of_cells():
    torch.manual_seed(0)
    parts = [torch.randn(1, 2, CELLS, 8) for _ in range(3)]
    kept = []
    with saved_tensors_hooks(lambda saved: kept.append(saved.numel()) or saved, lambda saved: saved), StayInFp64():
        found = gradients(parts, causal=True)
    assert max(kept, default=0) < CELLS * CELLS
    wanted = gradients([part.double() for part in parts], causal=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-6, atol=1e-7)
