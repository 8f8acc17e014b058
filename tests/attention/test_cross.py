"""Attention across axes: each sample as if it were alone, whatever lies beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from truebatch.attention.cross import attend_across
from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.errors import AttentionError
from truebatch.planning.rows import packed_row, padded_rows

H, KV, D = 4, 2, 8
SIZES = [(3, 5), (1, 1), (6, 2), (2, 0), (4, 9)]
FIELDS = {
    "rows": (Field(name="text"), Field(name="seen", axis="seen")),
    "flat": (Field(name="text"), Field(name="seen", kind="flat", axis="seen")),
}


def samples():
    made = torch.Generator().manual_seed(0)
    return [{"text": torch.randn(n, D, generator=made), "seen": torch.randn(m, D, generator=made)} for n, m in SIZES]


def batch_of(fields, layout):
    ids, lengths = np.arange(len(SIZES)), [n for n, _ in SIZES]
    rows = packed_row(ids, sum(lengths)) if layout == "packed" else padded_rows(ids, max(lengths))
    return collate(samples(), rows, fields)


def weights():
    torch.manual_seed(1)
    return [torch.nn.Linear(D, heads * D) for heads in (H, KV, KV)]


def alone(layers, sample):
    """One sample, by the formula; nothing is seen where there is nothing."""
    query, key, value = (
        f(sample[name]).unflatten(-1, (-1, D)) for f, name in zip(layers, ("text", "seen", "seen"), strict=True)
    )
    if not len(key):
        return query * 0
    key, value = (part.repeat_interleave(H // KV, 1) for part in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) / D**0.5
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", FIELDS)
def test_every_sample_sees_its_own_keys_as_if_it_were_alone(kind, layout):
    batch, layers = batch_of(FIELDS[kind], layout), weights()
    query, key, value = (
        f(batch[name]).unflatten(-1, (-1, D)) for f, name in zip(layers, ("text", "seen", "seen"), strict=True)
    )
    if kind == "rows":
        key, value = (part.masked_fill(~batch.rows("seen").is_real[..., None, None], 1e9) for part in (key, value))
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    found = attend_across(query.transpose(1, 2), key, value, batch, keys="seen")
    assert found.shape == (*batch.rows().shape[:1], H, batch.rows().shape[1], D)
    found.square().sum().backward()
    gradients = [p.grad.clone() for layer in layers for p in layer.parameters()]
    expected = weights()
    outputs = [alone(expected, sample) for sample in samples()]
    for own, wanted in zip(batch.per_sample(found.transpose(1, 2)), outputs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
    sum(one.square().sum() for one in outputs).backward()
    for got, layer_parameter in zip(gradients, (p for layer in expected for p in layer.parameters()), strict=True):
        torch.testing.assert_close(got, layer_parameter.grad, rtol=1e-4, atol=1e-5)


def test_one_query_a_sample_and_flat_queries():
    batch = batch_of(FIELDS["flat"], "padded")
    key = torch.randn(len(batch["seen"]), H, D)
    once = torch.randn(len(SIZES), H, D)
    found = attend_across(once, key, key, batch, queries="samples", keys="seen")
    start = 0
    for at, (_, n) in enumerate(SIZES):
        own = key[start : start + n]
        wanted = torch.zeros(H, D)
        if n:
            wanted = functional.scaled_dot_product_attention(
                once[at][:, None], own.transpose(0, 1), own.transpose(0, 1)
            )[:, 0]
        torch.testing.assert_close(found[at], wanted, rtol=1e-5, atol=1e-6)
        start += n
    assert attend_across(key, once, once, batch, queries="seen", keys="samples").shape == key.shape


def test_axes_of_other_groups_are_refused():
    fields = (Field(name="text"), Field(name="sets", kind="nested", axis="sets", inner="events"))
    held = [{"text": torch.zeros(2, D), "sets": [torch.zeros(1), torch.zeros(2)]}]
    batch = collate(held, padded_rows(np.arange(1), 2), fields)
    with pytest.raises(AttentionError, match="not of the same samples"):
        attend_across(torch.zeros(1, H, 2, D), *[torch.zeros(2, H, 2, D)] * 2, batch, keys="events")
