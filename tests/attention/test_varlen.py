"""PyTorch's varlen kernel, called in the words of several releases; a stand-in computes what it would."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from truebatch.attention.api import attend
from truebatch.attention.varlen import call_varlen, spell_options
from truebatch.batch.segments import packed_segments


def compute(q, k, v, starts, *, causal, window, scale):
    segments = packed_segments(starts.diff())
    rows = [part.transpose(0, 1)[None] for part in (q, k, v)]
    out = attend(*rows, segments, causal=causal, window=window, scale=scale, kernel="per_segment")
    return out[0].transpose(0, 1)


def first_release(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    scale = 1 / math.sqrt(query.shape[-1])
    return compute(query, key, value, cu_seq_q, causal=is_causal, window=None, scale=scale)


def later_release(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right in (0, left)
    return compute(
        query, key, value, cu_seq_q, causal=right == 0 != left, window=None if left < 0 else left + 1, scale=scale
    )


def parts_of(width: int, out_width: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(9, 4, width), (9, 2, width), (9, 2, out_width)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("kernel", [first_release, later_release])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "out_width"), [(8, 8), (6, 6), (12, 4)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_release_of_the_kernel_gives_the_same_attention(kernel, causal, width, out_width, scale):
    parts = parts_of(width, out_width)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = call_varlen(*parts, starts, max_length=5, causal=causal, window=None, scale=scale, kernel=kernel)
    torch.testing.assert_close(out, compute(*parts, starts, causal=causal, window=None, scale=scale))


def test_a_window_is_handed_over_without_the_querys_own_cell():
    parts = parts_of(8, 8)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = call_varlen(*parts, starts, max_length=5, causal=True, window=3, scale=None, kernel=later_release)
    torch.testing.assert_close(out, compute(*parts, starts, causal=True, window=3, scale=None))
    names = frozenset({"window_size", "is_causal"})
    assert spell_options(names, causal=True, window=3, grouped=False) == {"window_size": (2, 0), "is_causal": True}
    assert spell_options(names, causal=False, window=3, grouped=False)["window_size"] == (2, 2)


def test_the_installed_kernel_refuses_a_cpu_so_the_choice_must_not_name_it():
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        varlen_attn(*(torch.zeros(4, 2, 8) for _ in range(3)), starts, starts, 4, 4)
