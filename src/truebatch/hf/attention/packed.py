"""Packed attention for Hugging Face models, through their public attention and mask interfaces.

use_packed_attention(model) -> model(**packed_inputs(segments)) -> each attention layer -> attend inside segments
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from truebatch.attention.api import attend_by, attend_table
from truebatch.attention.score_rule import Rule, band_of, without_cudnn_sdpa, written_out_attention
from truebatch.attention.varlen_static import read_bounds
from truebatch.batch.segments import Segments, cell_positions
from truebatch.batch.torch_compile import force_eager, has_compiled_layers
from truebatch.errors import AttentionError
from truebatch.hf.attention.block_mask import block_mask_inputs
from truebatch.hf.attention.forward_context import (
    ForwardContext,
    current_run,
    forest_of_table,
    forget_services,
    hooked_alone,
    note_service,
    packed_rows,
    packing,
    positions_unread,
    refuse_lost_table,
    remember_lengths,
    segments_of_table,
)
from truebatch.hf.attention.registration import NAME, register
from truebatch.hf.attention.unsupported import (
    needs_search,
    refuse_call,
    refuse_packed_outside,
    refuse_unknown_window,
    takes_attention,
)
from truebatch.hf.mixers.outer_masks import makes_own_masks
from truebatch.hf.mixers.packing_plan import PackingPlan, find_plan, known_plan, plan_opened
from truebatch.hf.mixers.row_calls import called_in_rows

__all__ = [
    "NAME",
    "block_mask_inputs",
    "packed_attention",
    "packed_inputs",
    "packed_mask",
    "packed_rows",
    "use_packed_attention",
]

TABLE_WORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
KNOWN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "padding_mask_function",
}


@contextmanager
def use_packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """While open, `model` keeps samples apart when called with `packed_inputs`, and attends as with sdpa otherwise.

    Where more than attention reaches from cell to cell, or attention ignores the interface of transformers, a trial on
    a few short samples finds the modules that must see every sample as a row of its own; once for each model. Raises
    AttentionError with the reasons where none is enough. For a vision-language model, pass its language model.
    """
    plan = packing_plan_of(model)
    in_rows = nullcontext() if plan.way == "table" else called_in_rows(model)
    with packing(model), plan_opened(model, plan, _table_attention), in_rows:
        yield


def packing_plan_of(model: PreTrainedModel) -> PackingPlan:
    """How packed rows of this model are made right, found by a trial once for each model."""
    first = next(
        model.parameters(), None
    )  # of all weights only where nothing is known: this runs for every micro-batch
    if first is not None and not first.is_meta and not isinstance(first, FakeTensor):
        known = known_plan(model)
        if known is not None:
            return known
    if any(weight.is_meta for weight in model.parameters()) or detect_fake_mode(list(model.parameters())) is not None:
        is_plain = takes_attention(model) and not model.config.is_encoder_decoder
        return PackingPlan("table" if is_plain else "rows")  # nothing can be tried; shapes are all that is asked for
    eager = force_eager() if has_compiled_layers(model) else nullcontext()
    with eager, packing(model), without_cudnn_sdpa(model.device):
        return find_plan(model, _table_attention, is_plain=not needs_search(model))


def packed_whole(model: PreTrainedModel, part: PreTrainedModel) -> bool:
    """Whether a vision-language model must be packed as a whole: it makes the masks of its language model itself."""
    return makes_own_masks(model, part, _table_attention)


@contextmanager
def _table_attention(model: Any) -> Iterator[None]:
    """While open, the attention of `model` reads the segment table of packed rows."""
    register_functions()
    before = {"": model.config._attn_implementation}
    parts = {name: part._attn_implementation for name, part in _sub_configs(model).items()}
    before |= {name: attention for name, attention in parts.items() if attention is not None}
    if takes_attention(model):
        with hooked_alone(model):
            model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise AttentionError(
            "this architecture does not take its attention from the interface of transformers",
            seen=f"{type(model).__name__} stays with attention {model.config._attn_implementation!r}",
            do="call it with block_mask_inputs(model, segments), or plan the padded layout",
        )
    try:
        with positions_unread():
            yield
    finally:
        forget_services(model)
        model.set_attn_implementation(before)


def packed_inputs(
    segments: Segments, *, positions: Tensor | None = None, bounds: Tensor | None = None
) -> dict[str, Any]:
    """Keyword arguments that tell a model of its packed rows: positions that restart, and the segment table.

    `positions` are made here unless somebody has them. With `bounds` (`Segments.bounds_tensor`) no number that changes from
    row to row is handed over as a Python integer, so that compiled layers never compile again.
    """
    remember_lengths(segments)
    longest = segments.max_length if bounds is None else bounds
    return {
        "position_ids": cell_positions(segments) if positions is None else positions,
        "cu_seq_lens_q": segments.starts,
        "cu_seq_lens_k": segments.starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers: inside segments in a packed run, as with sdpa otherwise."""
    says_window = "sliding_window" in options
    rule = Rule(
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        window=options["sliding_window"] if says_window else getattr(module, "sliding_window", None),
        scale=scaling,
        dropout=dropout,
        bias=options.get("position_bias"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    starts = options.get("cu_seq_lens_q")
    if starts is not None and torch.compiler.is_compiling():
        refuse_call(module, query, key, attention_mask)
        return _compiled_inside_segments(query, key, value, rule, options).transpose(1, 2).contiguous(), None
    run = current_run()
    if starts is None and not (run is not None and run.is_packed):
        refuse_lost_table(module)
        if run is not None:
            run.calls += 1
        elif not torch.compiler.is_compiling():
            refuse_packed_outside(module, query, attention_mask, options.get("position_ids"))
        return _whole_rows(module, query, key, value, attention_mask, rule, options), None
    refuse_call(module, query, key, attention_mask)
    refuse_unknown_window(module, run, options)
    out = _inside_segments(module, query, key, value, rule, run, options)
    return out.transpose(1, 2).contiguous(), None


def packed_mask(**options: Any) -> Tensor | None:
    """The mask function given to transformers: nothing in a packed run, the mask of sdpa otherwise."""
    run = current_run()
    if run is not None:
        run.masks += 1
    if run is None or not run.is_packed:
        mask: Tensor | None = sdpa_mask(**options)
        return mask
    window = options.get("local_size")
    if window is not None:
        run.windows.add(window)
    unknown = sorted(set(_names_of(options["mask_function"])) - KNOWN_MASKS)
    if unknown or options.get("use_vmap"):
        raise AttentionError(
            "this model changes its causal mask in a way that packed attention does not know",
            seen=f"mask rules {unknown or 'given by the model'}",
            do="call it with padded rows, or give it a 4-D mask of your own",
        )
    return None


def register_functions() -> None:
    """Give transformers the functions themselves; `registration` knows them by name alone."""
    register()
    if ALL_ATTENTION_FUNCTIONS.get(NAME) is not packed_attention:
        AttentionInterface.register(NAME, packed_attention)
        AttentionMaskInterface.register(NAME, packed_mask)


def longest_of(starts: Tensor, options: dict[str, Any]) -> int:
    """The longest segment of a table, as a call's arguments say it, else read from the table."""
    given = options.get("max_length_q")
    if given is None:
        return int(starts.diff().max())
    return read_bounds(given).longest if isinstance(given, Tensor) else int(given)


def _inside_segments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    run: ForwardContext | None,
    options: dict[str, Any],
) -> Tensor:
    starts = options.get("cu_seq_lens_q")
    if run is not None:
        run.calls += 1
    if starts is None:
        note_service(module)
    elif isinstance(options.get("max_length_q"), Tensor) or not _is_table_of(run, starts):
        return _from_table(query, key, value, starts, rule, options)
    assert run is not None
    assert run.segments is not None
    return attend_by(rule, query, key, value, run.segments)


def _is_table_of(run: ForwardContext | None, starts: Tensor) -> bool:
    return run is not None and run.segments is not None and run.segments.starts is starts


def _from_table(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, rule: Rule, options: dict[str, Any]
) -> Tensor:
    given, max_length = options.get("max_length_q"), longest_of(starts, options)
    bound = given if isinstance(given, Tensor) else max_length
    if forest_of_table(starts) is None:
        out = attend_table(query, key, value, starts, rule, max_length=bound)
        if out is not None:
            return out
    shape = (query.shape[0], query.shape[2])
    return attend_by(rule, query, key, value, segments_of_table(starts, shape=shape, max_length=max_length))


def _compiled_inside_segments(query: Tensor, key: Tensor, value: Tensor, rule: Rule, options: dict[str, Any]) -> Tensor:
    """Inside torch.compile: from the arguments alone, because every number read elsewhere would compile again."""
    starts, bound = options["cu_seq_lens_q"], options["max_length_q"]
    out = attend_table(query, key, value, starts, rule, max_length=bound)
    assert out is not None
    return out


def _whole_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rule: Rule,
    options: dict[str, Any],
) -> Tensor:
    """Padded rows: what sdpa does, and the written-out formula where sdpa drops a softcap or sinks."""
    if rule.softcap is None and rule.sinks is None:
        given = {**options, "dropout": rule.dropout, "scaling": rule.scale, "is_causal": rule.causal}
        out: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **given)[0]
        return out
    queries, allowed = query.shape[2], attention_mask
    if allowed is None and queries > 1 and rule.causal:
        # No mask means that order is enough, counted from the first key: what a static cache has behind is empty.
        key, value = key[:, :, :queries], value[:, :, :queries]
        allowed = band_of(queries, key.shape[2], causal=True, window=None, device=query.device)
    return written_out_attention(query, key, value, allowed, rule).transpose(1, 2).contiguous()


def _names_of(rule: Callable[..., Any]) -> list[str]:
    """Names of the mask rules that transformers joined into one function."""
    if torch.compiler.is_compiling():
        return []
    parts = inspect.getclosurevars(rule).nonlocals.get("mask_functions")
    if parts is None:
        return [rule.__qualname__.split(".")[0]]
    return [name for part in parts for name in _names_of(part)]


def _sub_configs(model: PreTrainedModel) -> dict[str, Any]:
    found = {name: getattr(model.config, name, None) for name in getattr(model.config, "sub_configs", {})}
    return {name: part for name, part in found.items() if part is not None}
