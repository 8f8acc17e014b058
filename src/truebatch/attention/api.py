"""Attention inside samples, for padded and packed rows, forward and backward.

facts of the call -> choose_kernel -> planned | varlen | plain | block | per_segment -> [B, H, T, D]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from truebatch.attention.cudnn_graph import plans_are_possible
from truebatch.attention.cudnn_op import attend_rows_by_plan, can_attend_rows
from truebatch.attention.dispatch import AMPERE, Facts, Kernel, choose_kernel
from truebatch.attention.forest import attend_forest
from truebatch.attention.score_rule import Rule, band_of, softmax_attention, written_out_attention
from truebatch.attention.varlen import call_varlen, varlen_has_window, varlen_in_torch
from truebatch.attention.varlen_cpu import attend_on_host, can_attend_on_host
from truebatch.batch.forest import sees_segment
from truebatch.batch.key_dropout import drop_weights_of, is_keyed, next_purpose
from truebatch.batch.segments import Segments, owner_of_cells
from truebatch.errors import AttentionError

TABLE_KERNELS = ("planned", "varlen")
"""Kernels that read the samples of a row from the table on the device."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """[B, H, T, Dv]: every sample attends to itself alone, as if it were the only one.

    Query [B, H, T, D], key and value [B, Hkv, T, D] with Hkv dividing H. `window`: how many cells a query sees on each
    side, its own included. `bias`: added to the scores, broadcast to [B, H, T, T]. `sinks` [H]: one extra score per
    head that takes softmax weight and adds no value. `dropout` is applied whenever it is above 0: pass 0 in evaluation.
    Padding never influences a sample, forward or backward. `kernel` overrides the choice, for tests and benchmarks.

    >>> import torch
    >>> from truebatch import Field, PlanConfig, build_plan, collate
    >>> from truebatch.attention.api import attend
    >>> rows = build_plan([3, 2], PlanConfig(layout="packed")).step(0)[0][0]
    >>> batch = collate([{"x": torch.zeros(n, 8)} for n in (3, 2)], rows, [Field(name="x")])
    >>> q = torch.randn(1, 2, 5, 4)  # [B, H, T, D]
    >>> attend(q, q, q, batch.segments, causal=True).shape
    torch.Size([1, 2, 5, 4])
    """
    rule = Rule(causal=causal, window=window, scale=scale, dropout=dropout, bias=bias, softcap=softcap, sinks=sinks)
    return attend_by(rule, query, key, value, segments, kernel=kernel)


def attend_by(
    rule: Rule, query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, kernel: Kernel | None = None
) -> Tensor:
    """`attend` with its options in a `Rule`."""
    _check(query, key, value, segments, rule)
    if segments.num_cells == 0:
        return query.sum(-1, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
    query, key, value = _in_one_dtype(query, key, value)
    if segments.forest is not None:
        return attend_forest(rule, query, key, value, segments)
    if torch.compiler.is_compiling() and kernel is None and segments.layout == "packed":
        # Use tensors only: reading a length here would recompile the model for every row.
        query, key, value = (_empty_padding(part, segments) for part in (query, key, value))
        found = attend_table(query, key, value, segments.starts, rule, max_length=segments.bounds_tensor)
        assert found is not None
        return _empty_padding(found, segments)
    rule = _without_idle_window(rule, segments.max_length)
    if rule.dropout > 0 and is_keyed():
        return _keyed(query, key, value, segments, rule)
    chosen = kernel or _choose(query, value, segments, rule)
    return _KERNELS[chosen](query, key, value, segments, rule)


def attend_table(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, rule: Rule, *, max_length: int | Tensor
) -> Tensor | None:
    """Attention from the segment table on the device, without a host sync; None when the chosen kernel needs more.

    Shapes and code path depend on no length, so that a compiled model with a fixed number of slots compiles once.
    `max_length` may be `Segments.bounds_tensor`, whose values a compiled model does not depend on.
    """
    query, key, value = _in_one_dtype(query, key, value)
    rule = rule if isinstance(max_length, Tensor) else _without_idle_window(rule, max_length)
    facts = call_facts(query, value, rule)
    chosen = choose_kernel(facts)
    if chosen in TABLE_KERNELS:
        return _varlen_table(query, key, value, starts, rule, max_length=max_length, planned=chosen == "planned")
    if not facts.compiling:
        return None
    if not (_is_bare(rule) and can_attend_on_host(query, key, value)):
        return _block_table(query, key, value, starts, rule)
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    found = attend_on_host(_flat(query), _flat(key), _flat(value), starts, causal=rule.causal, scale=scale)
    return _unflat(found, query.shape[0])


def _is_bare(rule: Rule) -> bool:
    """True where nothing but order decides what a query sees, and nothing is done to its scores."""
    asks_for_more = rule.bias is not None or rule.softcap is not None or rule.sinks is not None
    return rule.window is None and rule.dropout == 0 and not asks_for_more


def _in_one_dtype(*parts: Tensor) -> tuple[Tensor, ...]:
    """Cast to one dtype, as autocast does for SDPA but not for varlen: RoPE often leaves query and key in fp32."""
    kind = parts[0].device.type
    if not torch.is_autocast_enabled(kind) or parts[0].dtype == torch.float64:
        return parts
    dtype = torch.get_autocast_dtype(kind)
    return tuple(part.to(dtype) for part in parts)


def _without_idle_window(rule: Rule, max_length: int) -> Rule:
    return replace(rule, window=None) if rule.window is not None and rule.window >= max_length else rule


def _choose(query: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Kernel:
    # These depend on no length, so skip the loop over all lengths, which would delay the launch.
    chosen = choose_kernel(call_facts(query, value, rule))
    if chosen in TABLE_KERNELS:
        return chosen
    return choose_kernel(gather_facts(query, value, segments, rule))


def call_facts(query: Tensor, value: Tensor, rule: Rule) -> Facts:
    """The facts of one call that do not depend on lengths."""
    on_gpu = query.device.type == "cuda"
    return Facts(
        device=query.device.type,
        capability=_capability(query.device) if on_gpu else None,
        dtype=query.dtype,
        head_size=max(query.shape[-1], value.shape[-1]),
        causal=rule.causal,
        has_window=rule.window is not None,
        has_dropout=rule.dropout > 0,
        has_bias=rule.bias is not None,
        reshapes_scores=rule.softcap is not None or rule.sinks is not None,
        compiling=torch.compiler.is_compiling(),
        varlen_in_torch=varlen_in_torch(),
        varlen_has_window=varlen_has_window(),
        plans_in_cudnn=on_gpu and plans_are_possible(),
    )


_capabilities: dict[int, tuple[int, int]] = {}
"""Device number -> compute capability. A compiled model can read this dict, but cannot query the device."""


def cache_device_capability(device: torch.device) -> None:
    """Query the compute capability of a GPU before layers are compiled for it; the first eager call does so too."""
    if device.type == "cuda":
        _capability(device)


def _capability(device: torch.device) -> tuple[int, int]:
    number = device.index or 0
    if torch.compiler.is_compiling():
        return _capabilities.get(number, AMPERE)
    if number not in _capabilities:
        _capabilities[number] = torch.cuda.get_device_capability(device)
    return _capabilities[number]


def gather_facts(query: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Facts:
    """The facts of one call; the host knows them all."""
    rows, cells = segments.shape
    lengths = segments.sample_lengths
    # A packed row that holds one sample is a padded row.
    rows_are_samples = len(lengths) == rows and (segments.layout == "packed" or segments.side == "right")
    return call_facts(query, value, rule)._replace(
        num_segments=len(set(lengths)),
        pairs=sum(length * length for length in lengths),
        dense_pairs=rows * cells * cells,
        rows_are_samples=rows_are_samples,
        has_padding=not all(segments.is_sample),
    )


def may_attend(segments: Segments, *, causal: bool, window: int | None = None) -> Tensor:
    """[B, 1, T, T] bool: True where query cell q may look at key cell k.

    A cell sees its own segment only, and the segments that it continues; padding sees padding, so that no softmax row
    is empty.
    """
    if segments.forest is None:
        return _may_attend_table(segments.starts, segments.shape, causal=causal, window=window)
    if not causal or window is not None:
        raise AttentionError(
            "the segments of a forest are attended to in order, without a window",
            seen=f"causal={causal}, window={window}",
            do="ask for causal=True and window=None, or give every sample a copy of its beginning",
        )
    owner = owner_of_cells(segments.starts, segments.shape)
    sees = sees_segment(segments.forest.parents).to(owner.device)
    band = band_of(segments.shape[1], segments.shape[1], causal=True, window=None, device=owner.device)
    assert band is not None
    return sees[owner[:, :, None], owner[:, None, :]][:, None] & band  # ancestors come first in a row


def _may_attend_table(starts: Tensor, shape: tuple[int, int], *, causal: bool, window: int | None) -> Tensor:
    owner = owner_of_cells(starts, shape)  # [B, T]
    same = owner[:, None, :, None] == owner[:, None, None, :]  # [B, 1, T, T]
    band = band_of(shape[1], shape[1], causal=causal, window=window, device=owner.device)
    return same if band is None else same & band


def _planned(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    if can_attend_rows(query, key, value):
        scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
        return attend_rows_by_plan(query, key, value, segments.starts, segments.bounds, causal=rule.causal, scale=scale)
    return _varlen_table(query, key, value, segments.starts, rule, max_length=segments.max_length, planned=True)


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    return _varlen_table(query, key, value, segments.starts, rule, max_length=segments.max_length, planned=False)


def _varlen_table(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, rule: Rule, *, max_length: int | Tensor, planned: bool
) -> Tensor:
    out = call_varlen(
        _flat(query),
        _flat(key),
        _flat(value),
        starts,
        max_length=max_length,
        causal=rule.causal,
        window=rule.window,
        scale=rule.scale,
        planned=planned,
    )
    return _unflat(out, query.shape[0])


def _plain(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    query, key, value = (_empty_padding(part, segments) for part in (query, key, value))
    return _empty_padding(softmax_attention(query, key, value, None, rule, causal=rule.causal), segments)


def _block(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    query, key, value = (_empty_padding(part, segments) for part in (query, key, value))
    return _empty_padding(_block_table(query, key, value, segments.starts, rule), segments)


def _block_table(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, rule: Rule) -> Tensor:
    shape = (query.shape[0], query.shape[2])
    allowed = _may_attend_table(starts, shape, causal=rule.causal, window=rule.window)
    return softmax_attention(query, key, value, allowed, rule, causal=False)


def _per_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    # split, not slices: its backward is one concatenation instead of a full-width addition for every segment.
    parts = [torch.split(_flat(part), list(segments.lengths)) for part in (query, key, value)]
    outs: list[Tensor | None] = [None] * len(segments.lengths)
    starts = _host_starts(segments)
    for members in _alike(segments, separate=rule.bias is not None):
        stacked = (torch.stack([part[i] for i in members]).transpose(1, 2) for part in parts)
        q, k, v = (part[members[0]][None].transpose(1, 2) for part in parts) if len(members) == 1 else stacked
        out = _one_length(q, k, v, _cut_bias(rule, starts[members[0]], q.shape[2], segments))  # [n, H, L, Dv]
        for i, piece in zip(members, out.transpose(1, 2).unbind(0), strict=True):
            outs[i] = piece
    shape = (query.shape[1], value.shape[-1])
    filled = [
        query.new_zeros(length, *shape) if out is None else out
        for out, length in zip(outs, segments.lengths, strict=True)
    ]
    return _unflat(torch.cat(filled), query.shape[0])


def _one_length(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Attention of samples of one length [n, H, L, D]; windows over long samples are computed in bands at linear
    cost."""
    length = query.shape[2]
    if rule.window is None or rule.window >= length:
        if rule.bias is None and rule.softcap is None and rule.sinks is None:
            return softmax_attention(query, key, value, None, rule, causal=rule.causal)
        allowed = band_of(length, length, causal=rule.causal, window=None, device=query.device)
        return softmax_attention(query, key, value, allowed, rule, causal=False)
    window, outs = rule.window, []
    for first in range(0, length, window):
        stop = min(first + window, length)
        low, high = max(0, first - window + 1), stop if rule.causal else min(length, stop + window - 1)
        allowed = band_of(
            stop - first, high - low, causal=rule.causal, window=window, device=query.device, first=first - low
        )
        bias = None if rule.bias is None else rule.bias[..., first:stop, low:high]
        keys, values = key[:, :, low:high], value[:, :, low:high]
        outs.append(
            softmax_attention(query[:, :, first:stop], keys, values, allowed, replace(rule, bias=bias), causal=False)
        )
    return torch.cat(outs, dim=2)


def _flat(part: Tensor) -> Tensor:
    """[B, H, T, D] -> [B*T, H, D]; a view for the layout that projections give."""
    return part.transpose(1, 2).reshape(-1, part.shape[1], part.shape[3])


def _unflat(out: Tensor, rows: int) -> Tensor:
    return out.reshape(rows, -1, out.shape[1], out.shape[2]).transpose(1, 2)


def _empty_padding(part: Tensor, segments: Segments) -> Tensor:
    """Zero the padding, so that its content, even NaN, reaches no sample and gets no gradient."""
    if not torch.compiler.is_compiling() and all(segments.is_sample):
        return part  # in a compiled model, a check here would recompile for every row
    return torch.where(segments.is_real[:, None, :, None], part, 0)


def _keyed(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> Tensor:
    """One sample at a time, with dropout that belongs to it."""
    purpose = next_purpose()
    parts = [torch.split(_flat(part), list(segments.lengths)) for part in (query, key, value)]
    outs, starts = [], _host_starts(segments)
    for i, length in enumerate(segments.lengths):
        q, k, v = (part[i][None].transpose(1, 2) for part in parts)
        if not segments.is_sample[i] or not length:
            outs.append(q.new_zeros(length, q.shape[1], v.shape[-1]))
            continue
        allowed = band_of(length, length, causal=rule.causal, window=rule.window, device=q.device)
        own = _cut_bias(rule, starts[i], length, segments)
        drop = partial(drop_weights_of, p=rule.dropout, purpose=purpose, cells=(starts[i], segments.shape))
        outs.append(written_out_attention(q, k, v, allowed, own, drop=drop)[0].transpose(0, 1))
    return _unflat(torch.cat(outs), query.shape[0])


def _alike(segments: Segments, *, separate: bool) -> list[list[int]]:
    """Indices of the sample segments, grouped by length (in order of first appearance)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (length, real) in enumerate(zip(segments.lengths, segments.is_sample, strict=True)):
        if real and length:
            groups.setdefault((length, i if separate else 0), []).append(i)
    return list(groups.values())


def _host_starts(segments: Segments) -> list[int]:
    starts, total = [], 0
    for length in segments.lengths:
        starts.append(total)
        total += length
    return starts


def _cut_bias(rule: Rule, start: int, length: int, segments: Segments) -> Rule:
    if rule.bias is None:
        return rule
    cells = segments.shape[1]
    row, first = divmod(start, cells)
    bias = rule.bias.expand(segments.shape[0], -1, cells, cells)[row : row + 1]
    return replace(rule, bias=bias[:, :, first : first + length, first : first + length])


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def _is_in_rows(part: Tensor, rows: tuple[int, int]) -> bool:
    shape = part.shape
    return len(shape) == 4 and (shape[0], shape[2]) == rows


def _check(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: Rule) -> None:
    rows = segments.shape
    if not (_is_in_rows(query, rows) and _is_in_rows(key, rows) and _is_in_rows(value, rows)):
        raise AttentionError(
            "query, key and value do not have the rows of the segment table",
            seen=f"{_shapes(query, key, value)}, table for rows [{rows[0]}, {rows[1]}]",
            do=f"pass [B, H, T, D] tensors with B={rows[0]}, T={rows[1]}; a key/value cache has another length",
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise AttentionError(
            "the heads of key and value must divide the heads of query",
            seen=_shapes(query, key, value),
            do="check the head counts",
        )
    if rule.window is not None and rule.window < 1:
        raise AttentionError(
            "a window holds at least the query's own cell", seen=f"window={rule.window}", do="use >= 1"
        )
    if not 0 <= rule.dropout < 1:
        raise AttentionError("dropout is a share below 1", seen=f"dropout={rule.dropout}", do="use 0 <= dropout < 1")


_KERNELS = {"planned": _planned, "varlen": _varlen, "plain": _plain, "block": _block, "per_segment": _per_segment}
