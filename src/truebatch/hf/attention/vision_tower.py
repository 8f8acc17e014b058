"""Vision towers that keep images apart by a table of first patches: one call of attention for all images of a batch.

transformers gives such a tower's attention one image at a time unless a flash-attention package is asked for, by a name
with "flash" in it. Ours has such a name, and takes the whole table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from truebatch.attention.api import attend, attend_table
from truebatch.attention.score_rule import Rule
from truebatch.attention.varlen_static import no_kept_keys
from truebatch.hf.attention.forward_context import segments_of_table
from truebatch.hf.attention.packed import TABLE_WORDS
from truebatch.hf.forward_inputs import inner_model

NAME = "truebatch_flash_images"
TOWERS = ("visual", "vision_tower", "vision_model")


@contextmanager
def one_call_for_images(model: nn.Module) -> Iterator[None]:
    """While open, the vision tower of `model` attends inside all its images at once, where it works from a table."""
    configs = _tower_configs(model)
    AttentionInterface.register(NAME, images_attention)
    before = [config._attn_implementation for config in configs]
    handles = [tower.register_forward_pre_hook(_without_text_table, with_kwargs=True) for tower in _towers(model)]
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for handle in handles:
            handle.remove()


def _without_text_table(tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """transformers up to 5.17 hands the table of the text's rows to the tower too, which has a table of images."""
    return args, {name: value for name, value in kwargs.items() if name not in TABLE_WORDS}


def images_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers: inside the images of its table, as with sdpa without one."""
    starts = options.get("cu_seq_lens_q")
    if starts is None or attention_mask is not None:
        out = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        return out[0], None
    rule = Rule(causal=False, window=None, scale=scaling, dropout=dropout, bias=None, softcap=None, sinks=None)
    longest = int(options["max_length_q"])
    with no_kept_keys():
        found = attend_table(query, key, value, starts, rule, max_length=longest)
    if found is None:
        segments = segments_of_table(starts, shape=(query.shape[0], query.shape[2]), max_length=longest)
        found = attend(query, key, value, segments, causal=False, scale=scaling, dropout=dropout)
    return found.transpose(1, 2).contiguous(), None


def _tower_configs(model: nn.Module) -> list[Any]:
    """The settings of vision towers whose attention takes a table and is transformers' sdpa."""
    found = [tower for tower in _towers(model) if _takes_table(tower)]
    return [tower.config for tower in found if getattr(tower.config, "_attn_implementation", None) == "sdpa"]


def _towers(model: nn.Module) -> list[nn.Module]:
    found = (getattr(inner_model(model), name, None) for name in TOWERS)
    return [tower for tower in found if isinstance(tower, nn.Module)]


_table_takers: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _takes_table(tower: nn.Module) -> bool:
    """Asked for every batch; the walk over all modules is done once."""
    if tower not in _table_takers:
        _table_takers[tower] = any("cu_seqlens" in inspect.signature(p.forward).parameters for p in tower.modules())
    return _table_takers[tower]
