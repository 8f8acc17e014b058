"""Make the configuration of any Hugging Face architecture tiny, by the names of its sizes.

defaults of the configuration class -> every size by name -> layer lists cut together -> parts inside parts -> the class
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from truebatch.testing.tiny_hf.size_overrides import TINY_SIZE_OVERRIDES
from truebatch.testing.tiny_hf.sizes import (
    ALWAYS,
    DEPTHS,
    DROPOUT,
    FIRST_FREE_ID,
    HEADS,
    LAYERS,
    SIZES,
    TOKEN_ID,
    VOCAB,
)

MOST_LAYERS = 6
"""A pattern of layers is shortened, never below one layer of each kind, never above this."""


def tiny_config(config_type: type[PreTrainedConfig], given: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A configuration of this class with every size small and every dropout 0.

    `given` values are taken over where the class has such a setting.

    Layers of every kind the architecture mixes (sliding and full attention, recurrent and attention, dense and experts)
    are kept, and special token ids lie inside the small vocabulary, each its own.
    """
    own = TINY_SIZE_OVERRIDES.get(getattr(config_type, "model_type", ""), {})
    defaults = config_type(**own.get("defaults", {}))
    known = {name: value for name, value in (given or {}).items() if name in vars(defaults)}
    return config_type(**{**_tiny_values(defaults, {}), **known})


def _tiny_values(config: PreTrainedConfig, ids: dict[str, int]) -> dict[str, Any]:
    """Constructor arguments: only what changes, and the parts inside (text, vision, ...) as dictionaries."""
    own = TINY_SIZE_OVERRIDES.get(getattr(config, "model_type", ""), {})
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    renamed = set(getattr(config, "attribute_map", {}))
    out: dict[str, Any] = {}
    kept = _kept_layers(values)
    for name, value in values.items():
        if name in renamed:
            continue
        small = _tiny_value(name, value, values, kept, ids)
        if small is not _KEEP:
            out[name] = small
    out.update({name: value for name, value in own.items() if name != "defaults"})
    return out


_KEEP = object()


def _tiny_value(name: str, value: Any, values: Mapping[str, Any], kept: list[int], ids: dict[str, int]) -> Any:
    if isinstance(value, PreTrainedConfig):
        return {**_tiny_values(value, ids), "model_type": value.model_type}
    if TOKEN_ID.search(name):
        return _small_id(name, value, ids)
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
        return _small_rope(value)
    if isinstance(value, float) and DROPOUT.search(name):
        return 0.0
    if isinstance(value, list | tuple) and _is_per_layer(name, value, values):
        return type(value)(range(len(kept) or LAYERS) if _names_all_layers(value) else (value[i] for i in kept))
    if name in DEPTHS and kept and _lists(values):
        return len(kept)
    return _small_size(name, value, values)


def _small_size(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    if name not in SIZES or isinstance(value, list | tuple | Mapping):
        return _KEEP
    if value == 0 or (value is None and name not in ALWAYS):  # 0 and None say that the architecture has no such part
        return _KEEP
    if name == "head_dim" and values.get("qk_rope_head_dim"):
        return SIZES["qk_rope_head_dim"]  # low-rank attention: what is rotated, not what a head has
    if name == "num_key_value_heads" and "kv_lora_rank" in values:
        return HEADS  # low-rank attention has no grouped heads
    return SIZES[name]


def _kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Which layers stay: the first of each kind, where a kind is what all lists together say of a layer."""
    lists = _lists(values)
    kinds: dict[tuple[str, ...], int] = {}
    for i, kind in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(tuple(map(repr, kind)), i)
    first = sorted(kinds.values())[:MOST_LAYERS]
    depth = len(lists[0]) if lists else 0
    more = [i for i in range(depth) if i not in first][: max(0, LAYERS - len(first))]
    return sorted([*first, *more])


def _lists(values: Mapping[str, Any]) -> list[Any]:
    lists = [v for name, v in values.items() if isinstance(v, list | tuple) and _is_per_layer(name, v, values)]
    return [v for v in lists if not _names_all_layers(v)]


def _names_all_layers(value: Any) -> bool:
    return list(value) == list(range(len(value)))


def _is_per_layer(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    depth = next((values[d] for d in DEPTHS if isinstance(values.get(d), int)), None)
    return depth is not None and depth > 1 and len(value) == depth and name.endswith(_LAYER_LISTS)


_LAYER_LISTS = ("layers", "layer_types", "block_type", "_types", "_per_layer", "rope_theta", "pattern")


def _small_id(name: str, value: Any, ids: dict[str, int]) -> Any:
    """The id itself if it is small, else a new one that belongs to this name alone."""
    if isinstance(value, list | tuple):
        return type(value)(_small_id(f"{name}.{i}", v, ids) for i, v in enumerate(value))
    if not isinstance(value, int) or isinstance(value, bool):
        return _KEEP if value is not None or name != "pad_token_id" else 0
    key = name.replace("_token_index", "_token_id")
    if 0 <= value < 16 and key not in ids:
        return value
    return ids.setdefault(key, FIRST_FREE_ID + len(ids)) % VOCAB


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The same rotary scheme with lists that fit the small heads."""
    out: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            out[name] = _small_rope(value)
        elif name == "mrope_section":
            out[name] = _small_section(list(value))
        elif name in ("short_factor", "long_factor"):
            out[name] = list(value)[: SIZES["head_dim"] // 2]
        elif name == "original_max_position_embeddings":
            out[name] = SIZES["max_position_embeddings"]
        else:
            out[name] = value
    return out


def _small_section(section: list[int]) -> list[int]:
    half = SIZES["head_dim"] // 2
    small = [max(1, round(half * part / sum(section))) for part in section]
    small[0] += half - sum(small)
    return small
