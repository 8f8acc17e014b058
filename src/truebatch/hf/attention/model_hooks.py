"""Hooks of models that attend with `truebatch`: what a call says of its rows becomes a segment table for every layer.

model(input_ids, ...) -> read_rows -> cu_seq_lens_q, position_ids -> attention inside segments -> output

A model that is called inside another one gets the table from it, by its arguments or, where they are lost on the way,
from the call around it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from truebatch.batch.segments import Segments, owner_of_cells
from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import (
    ForwardContext,
    close_run,
    current_run,
    is_packing,
    is_remembered,
    may_be_hooked,
    open_run,
    samples_of_table,
    segments_of_table,
)
from truebatch.hf.attention.packed import TABLE_WORDS, longest_of, packed_inputs, register_functions
from truebatch.hf.attention.read_rows import RowWords, read_rows
from truebatch.hf.attention.registration import NAME
from truebatch.hf.attention.unsupported import refuse_model
from truebatch.hf.mixers.trial_rows import first_position

MEDIA = frozenset({"pixel_values", "input_features", "input_values", "pixel_values_videos"})
"""Arguments of models that put something else than text into their rows, and make positions for it themselves."""
ROW_WORDS = ("attention_mask", "position_ids", "past_key_values", "seq_idx", *TABLE_WORDS)
_packed_caches: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Caches filled by packed rows: to go on from them would mix samples."""


@dataclass(slots=True, eq=False)
class Hooks:
    """What is kept at a model; a copy of the model has its own."""

    handles: tuple[Any, ...]
    first_position: int | None = None
    """Found in the first packed call: the model has no parts yet when the hooks are made."""
    is_allowed: bool = False
    """True once the model was found fit for packed rows."""


@dataclass(slots=True, eq=False)
class ModelCall:
    """One call of a model, its arguments by name."""

    model: PreTrainedModel
    named: dict[str, Any]
    accepts: frozenset[str]
    takes_any: bool
    shape: tuple[int, int] | None = field(init=False)
    """Rows and cells; None where no tokens are given."""
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        given = (self.named.get(name) for name in ("input_ids", "inputs_embeds"))
        tokens = next((part for part in given if isinstance(part, Tensor) and part.ndim > 1), None)
        self.shape = None if tokens is None else (tokens.shape[0], tokens.shape[1])
        self.device = torch.device("cpu") if tokens is None else tokens.device

    @property
    def hooks(self) -> Hooks:
        """Of the model that is called."""
        found: Hooks = self.model._truebatch_hooks
        return found

    @property
    def has_media(self) -> bool:
        """True for a model that makes positions for more than text."""
        return bool(self.accepts & MEDIA) or hasattr(self.model, "get_rope_index")

    @property
    def mask(self) -> Any:
        """The attention mask where it has one entry for every cell; a 4-D mask is the caller's own rule."""
        mask = self.named.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or self.shape is None:
            return None
        return mask if mask.shape[1] == self.shape[1] else None

    @property
    def has_own_mask(self) -> bool:
        """True where a mask says for every pair of cells what a query sees."""
        mask = self.named.get("attention_mask")
        return isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim > 2)


def follow_choice(model: PreTrainedModel, chosen: str) -> str:
    """Add hooks to a model that has chosen `truebatch`, take them away when it chooses another attention.

    The attention that serves the model: a part that reads images or sound, and does not take its attention from
    transformers' interface, keeps its own.
    """
    alike = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is model.config]
    if chosen != NAME:
        for part in alike:
            _remove_hooks(part)
        return chosen
    if _has_own_attention(model):
        if model.main_input_name != "input_ids":
            return model.get_correct_attn_implementation(None)  # type: ignore[no-any-return]
        raise AttentionError(
            "this architecture does not take its attention from the interface of transformers",
            seen=f"{type(model).__name__} with attn_implementation={NAME!r}",
            do="load it with attn_implementation='eager' and plan the padded layout",
        )
    register_functions()
    for part in filter(may_be_hooked, alike):
        _add_hooks(part)
    return chosen


def _has_own_attention(model: PreTrainedModel) -> bool:
    """True where the source of the model shows so; it cannot be read for a class written in a notebook."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    return can_set is not None and type(model).__module__.startswith("transformers.") and not can_set()


def _add_hooks(model: PreTrainedModel) -> None:
    if "_truebatch_hooks" not in model.__dict__:
        handles = (
            model.register_forward_pre_hook(_begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(_end, always_call=True),
        )
        model._truebatch_hooks = Hooks(handles)


def _remove_hooks(model: PreTrainedModel) -> None:
    hooks = model.__dict__.pop("_truebatch_hooks", None)
    for handle in hooks.handles if hooks is not None else ():
        handle.remove()


def _begin(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    outer, run = current_run(), ForwardContext(segments=None, is_packed=False)
    open_run(run)  # first of all: `_end` closes it whatever happens
    if outer is not None and outer.explicit and kwargs.get("cu_seq_lens_q") is None:
        run.segments, run.is_packed, run.explicit = outer.segments, True, True
        run.targets, run.groups = outer.targets, outer.groups
        return args, kwargs
    names = _argument_names(model)
    if args and "*" in names.accepts:
        return args, kwargs  # a forward pass of somebody else, called by position
    call = ModelCall(model, {**dict(zip(names.order, args, strict=False)), **kwargs}, names.accepts, names.takes_any)
    if torch.compiler.is_compiling():
        words = _compiled_words(call, outer)
    else:
        run.segments = _segments_of(call, outer)
        run.is_sample = None if run.segments is None else samples_of_table(run.segments.starts)
        words = None if run.segments is None else _table_words(call, run.segments)
    run.is_packed = words is not None
    if words is None:
        return (), {**call.named, **_left_padding_words(call)}
    return (), _arguments(call, words)


def _end(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    run = close_run()
    if torch.compiler.is_compiling():
        return  # calls are not counted there
    outer = current_run()
    if outer is not None:
        outer.calls += run.calls
    if output is None:
        return
    cache = getattr(output, "past_key_values", None)
    if run.is_packed and not run.explicit and cache is not None:
        _packed_caches[cache] = True
    if not run.calls and (run.masks or run.is_packed) and not _is_compiled(model):
        raise AttentionError(
            "a packed run went through a model that never asked for packed attention"
            if run.is_packed
            else "masks were made for attention 'truebatch', which the model never called",
            seen=f"{type(model).__name__} made its output without one call of attention {NAME!r}",
            do="call it with block_mask_inputs(model, segments), or plan the padded layout"
            if run.is_packed
            else "load it with attn_implementation='eager' and plan the padded layout",
        )


def _is_compiled(model: nn.Module) -> bool:
    """True where a part of the model runs compiled, and its calls are not counted."""
    kinds = (part for part in model.modules() if part._compiled_call_impl is not None or "forward" in part.__dict__)
    wrapped = (part for part in model.modules() if isinstance(part, torch._dynamo.OptimizedModule))
    return next(kinds, None) is not None or next(wrapped, None) is not None


@dataclass(frozen=True, slots=True)
class _Arguments:
    order: tuple[str, ...]
    accepts: frozenset[str]
    """With `*` for a forward pass that takes arguments by position which it does not name."""
    takes_any: bool


def _argument_names(model: nn.Module) -> _Arguments:
    own = type(model).forward
    is_own = getattr(model.forward, "__func__", None) is own  # others may hold a whole model
    return _known_arguments(own) if is_own and not torch.compiler.is_compiling() else _read_arguments(model.forward)


def _read_arguments(forward: Callable[..., Any]) -> _Arguments:
    parameters = [part for part in inspect.signature(forward).parameters.values() if part.name != "self"]
    order = tuple(part.name for part in parameters if part.kind in (part.POSITIONAL_ONLY, part.POSITIONAL_OR_KEYWORD))
    named = frozenset(part.name for part in parameters if part.kind not in (part.VAR_KEYWORD, part.VAR_POSITIONAL))
    more = {"*"} if any(part.kind is part.VAR_POSITIONAL for part in parameters) else set()
    return _Arguments(order, named | more, any(part.kind is part.VAR_KEYWORD for part in parameters))


_known_arguments = functools.lru_cache(maxsize=256)(_read_arguments)
"""Asked in every call; a compiler would look through the cache and warn of it."""


def _segments_of(call: ModelCall, outer: ForwardContext | None) -> Segments | None:
    """The segments of packed rows; None for one sample a row."""
    named = call.named
    starts, cache = named.get("cu_seq_lens_q"), named.get("past_key_values")
    if cache is not None and cache in _packed_caches and cache.get_seq_length() > 0:
        raise AttentionError(
            "this cache was filled by packed rows, and to go on from it would mix their samples",
            seen=f"{type(call.model).__name__} with past_key_values of a packed call",
            do="make the cache with one sample a row, or pass use_cache=False",
        )
    if call.shape is None:
        if starts is None:
            return None
        call.shape, call.device = _shape_of_other_tokens(named), starts.device
    if isinstance(starts, Tensor) and is_remembered(starts):
        segments = segments_of_table(starts, shape=call.shape, max_length=longest_of(starts, named))
    elif starts is None and outer is not None and outer.segments is not None and outer.segments.shape == call.shape:
        segments = outer.segments  # the model around this one keeps its arguments to itself
    else:
        read = _read(call)
        if read is None:
            return None
        segments = read
    _refuse_packed_call(call)
    return segments


def _shape_of_other_tokens(named: dict[str, Any]) -> tuple[int, int]:
    first = next(part for part in named.values() if isinstance(part, Tensor) and part.ndim > 1)
    return first.shape[0], first.shape[1]


def _read(call: ModelCall) -> Segments | None:
    named, shape = call.named, call.shape
    assert shape is not None
    table, labels, positions = (named.get(name) for name in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    if table is None and (shape[1] == 1 or call.has_own_mask):
        return None
    mask = call.mask
    numbered = mask is not None and mask.dtype not in (torch.bool, torch.float16, torch.bfloat16)
    if table is None and labels is None and positions is None and not numbered:
        return None
    _refuse_two_tables(table, named.get("cu_seq_lens_k"))
    words = RowWords(
        shape=shape,
        table=table,
        labels=labels,
        mask=mask,
        positions=positions,
        first_position=_first_position(call),
    )
    return read_rows(words, call.device)


def _refuse_two_tables(queries: Any, keys: Any) -> None:
    if keys is None or keys is queries:
        return
    if (
        queries is None
        or len(queries) != len(keys)
        or any(int(q) != int(k) for q, k in zip(queries, keys, strict=True))
    ):
        raise AttentionError(
            "packed attention is self-attention without a cache",
            seen="cu_seq_lens_k that is not cu_seq_lens_q",
            do="give the same table for both",
        )


def _refuse_packed_call(call: ModelCall) -> None:
    cache = call.named.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise AttentionError(
            "packed attention is self-attention without a cache",
            seen=f"{type(call.model).__name__} with packed rows and a cache of {int(cache.get_seq_length())} cells",
            do="generate and cross-attend with padded rows; in training pass use_cache=False",
        )
    if cache is not None:
        _packed_caches[cache] = True
    is_tried = is_packing(call.model)
    if not call.hooks.is_allowed and not call.has_media and not is_tried:
        refuse_model(call.model)
        call.hooks.is_allowed = True
    if is_tried or call.named.get("position_ids") is not None:
        return
    if call.has_media or not (call.takes_any or "position_ids" in call.accepts):
        raise AttentionError(
            "this model makes its positions from whole rows, so packed samples would not start at 0",
            seen=f"{type(call.model).__name__} without position_ids",
            do="give position_ids that begin again with every sample, or plan the padded layout with right padding",
        )


def _table_words(call: ModelCall, segments: Segments) -> dict[str, Any]:
    words, starts = packed_inputs(segments), call.named.get("cu_seq_lens_q")
    if starts is segments.starts:  # made by us: with the bounds that compiled layers need
        words |= {name: call.named[name] for name in TABLE_WORDS if call.named.get(name) is not None}
    words["position_ids"] = words["position_ids"] + _first_position(call)
    return words


def _arguments(call: ModelCall, words: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a packed call: no mask beside the table, no cache unless asked for, what the model can take."""
    given = call.named.get("position_ids")
    named = {**call.named, **words, "position_ids": words["position_ids"] if given is None else given}
    if not call.has_own_mask and named.get("attention_mask") is not None:
        named["attention_mask"] = None
    if "use_cache" in call.accepts and named.get("use_cache") is None and named.get("past_key_values") is None:
        named["use_cache"] = False
    has_types = "token_type_ids" in call.accepts and bool(getattr(call.model.config, "type_vocab_size", 0))
    if has_types and named.get("token_type_ids") is None and call.shape is not None:
        named["token_type_ids"] = torch.zeros(call.shape, dtype=torch.int64, device=call.device)
    kept = ("seq_idx", *TABLE_WORDS, *words)
    return {name: value for name, value in named.items() if call.takes_any or name in call.accepts or name not in kept}


def _left_padding_words(call: ModelCall) -> dict[str, Any]:
    """Positions for rows with padding on the left, which many models would count along."""
    mask, names = call.mask, call.named
    counts_itself = call.has_media or "position_ids" not in call.accepts or getattr(call.model.config, "alibi", False)
    is_said = names.get("position_ids") is not None or names.get("past_key_values") is not None
    if mask is None or counts_itself or is_said or call.shape is None or call.shape[1] == 1:
        return {}
    if _first_position(call):
        return {}  # RoBERTa and its kin count the cells that are no padding
    first = (mask != 0).int().argmax(-1, keepdim=True)
    cells = torch.arange(call.shape[1], device=mask.device)
    return {"position_ids": (cells - first).clamp(min=0)}


def _compiled_words(call: ModelCall, outer: ForwardContext | None) -> dict[str, Any] | None:
    """Inside torch.compile: from the arguments alone where there is a table, else read outside of the graph."""
    starts = call.named.get("cu_seq_lens_q")
    if starts is None:
        if outer is not None and outer.is_packed:
            raise AttentionError(
                "attention over packed rows was called without a segment table",
                seen=f"{type(call.model).__name__} inside a model that keeps its arguments to itself, compiled",
                do="compile its layers with truebatch.batch.torch_compile.compile_layers, or run it eagerly",
            )
        says = any(call.named.get(name) is not None for name in ("seq_idx", "position_ids"))
        if not says or call.shape is None or call.shape[1] == 1 or call.has_own_mask:
            return None
        found: dict[str, Any] | None = _words_outside_the_graph(call)
        return found
    words = {name: call.named[name] for name in TABLE_WORDS if call.named.get(name) is not None}
    if call.named.get("position_ids") is None and call.shape is not None:
        owner = owner_of_cells(starts, call.shape)
        cells = torch.arange(call.shape[0] * call.shape[1], device=starts.device).view(call.shape)
        words["position_ids"] = cells - starts[owner].long() + _first_position(call)
    else:
        words["position_ids"] = call.named.get("position_ids")
    return words


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="truebatch reads on the host where samples begin: give cu_seq_lens_q and max_length_q for one whole graph"
)
def _words_outside_the_graph(call: ModelCall) -> dict[str, Any] | None:
    segments = _segments_of(call, None)
    return None if segments is None else _table_words(call, segments)


def _first_position(call: ModelCall) -> int:
    """The position of a sample's first token; RoBERTa and its kin count from `padding_idx + 1`."""
    hooks = call.hooks
    if hooks.first_position is None:
        hooks.first_position = first_position(call.model)
    return hooks.first_position
