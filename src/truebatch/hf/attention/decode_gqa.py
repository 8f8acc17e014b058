"""Attention of one new token a row without copies of keys and values, through the attention interface of transformers.

grouped_configs(model), once -> with attend_folded(configs): a forward pass of one token a row -> as before again
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "truebatch_rows"
"""The name under which transformers knows this attention."""

_PLAIN = "sdpa"
_OTHER_RULES = ("position_bias", "softcap", "s_aux", "cache", "output_attentions")
"""Options with which attention is more than a softmax over allowed keys."""


def grouped_configs(model: nn.Module) -> tuple[Any, ...]:
    """The configs, each once, from which layers with grouped heads take their attention; none where one has its own way.

    Pass the text part of a vision-language model. To be asked once for a model: it walks over all modules.
    """
    parts = [part for part in model.modules() if getattr(part, "num_key_value_groups", 1) > 1]
    configs = {id(part.config): part.config for part in parts if _is_alone(getattr(part, "config", None))}
    readers = [part for part in model.modules() if id(getattr(part, "config", None)) in configs]
    if not all(_takes_any_name(type(part).__module__) for part in readers):
        return ()
    return tuple(configs.values())


@contextmanager
def attend_folded(configs: Sequence[Any]) -> Iterator[None]:
    """While open, layers of these configs that attend with sdpa do so without copied heads; others stay as they are."""
    # Here, not where configs are found: a decoder may have come from another process.
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    # Read and written by value, not remembered: two that use one model at once leave it as it was.
    for config in configs:
        if config._attn_implementation == _PLAIN:
            config._attn_implementation = NAME
    try:
        yield
    finally:
        for config in configs:
            if config._attn_implementation == NAME:
                config._attn_implementation = _PLAIN


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What sdpa gives: for one query the heads that share a key head are its queries, and everything else is left to it.

    query [B, H, 1, D], key [B, K, S, D] -> query [B, K, H/K, D] -> [B, 1, H, D]
    """
    if dropout or not _is_foldable(module, query, key, attention_mask, options):
        out: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[_PLAIN](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out
    rows, heads, _, size = query.shape
    groups = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    made = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scaling)
    return made.reshape(rows, 1, heads, value.shape[-1]), None


def _is_foldable(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> bool:
    groups = getattr(module, "num_key_value_groups", 1)
    return (
        query.shape[2] == 1
        and groups > 1
        and query.shape[1] == key.shape[1] * groups
        and (attention_mask is None or attention_mask.shape[1:3] == (1, 1))
        and not any(options.get(name) is not None and options[name] is not False for name in _OTHER_RULES)
    )


def _is_alone(config: PretrainedConfig) -> bool:
    """True for a config that hands its attention to no config below it."""
    return hasattr(config, "_attn_implementation") and not getattr(config, "sub_configs", None)


@cache
def _takes_any_name(module: str) -> bool:
    """Whether the code of a model gives its attention's name to the interface, and nowhere compares it with sdpa."""
    try:
        code = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made in a shell, or without its source
        return False
    return not any(_asks_itself(node) for node in ast.walk(ast.parse(code)))


def _asks_itself(node: ast.AST) -> bool:
    asked = [*node.comparators, node.left] if isinstance(node, ast.Compare) else []
    asked += [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else []
    return any(isinstance(part, ast.Constant) and part.value == _PLAIN for top in asked for part in ast.walk(top))
