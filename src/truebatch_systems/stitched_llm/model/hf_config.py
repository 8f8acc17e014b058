"""The configuration of a stitched model: those of its two cut donors, and what joins them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from truebatch_systems.stitched_llm.model.adapter import AdapterShape

_OF_TOP = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""What a donor does to its logits, under the names the rest of the library reads."""


class StitchedConfig(PretrainedConfig):  # type: ignore[misc]
    """As transformers saves and loads it. `bottom` and `top` are configurations of donors that are cut already."""

    model_type = "stitched_llm"
    sub_configs = {"bottom": AutoConfig, "top": AutoConfig}  # noqa: RUF012

    def __init__(
        self, bottom: Any = None, top: Any = None, adapter: Any = None, origin: Any = None, **kwargs: Any
    ) -> None:
        self.bottom = _as_config(bottom)
        self.top = _as_config(top)
        self.adapter = dict(adapter or {})
        self.origin = dict(origin or {})
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: transformers would copy this file beside every model it saves, and the package has it."""

    @property
    def adapter_shape(self) -> AdapterShape:
        """What the adapter is built from."""
        return AdapterShape(**self.adapter)


def join_configs(bottom: Any, top: Any, shape: AdapterShape, *, vocab_size: int, origin: Any) -> StitchedConfig:
    """The configuration of a stitched model, with what tools look for: sizes of its top, ids of its vocabulary."""
    speaker = top if "respelling" in origin else bottom
    ids = {name: getattr(speaker, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    rules = {name: getattr(top, name) for name in _OF_TOP if getattr(top, name, None) is not None}
    return StitchedConfig(
        bottom=bottom,
        top=top,
        adapter=asdict(shape),
        origin=origin,
        vocab_size=vocab_size,
        hidden_size=top.hidden_size,
        num_hidden_layers=bottom.num_hidden_layers + top.num_hidden_layers,
        num_attention_heads=top.num_attention_heads,
        num_key_value_heads=top.num_key_value_heads,
        max_position_embeddings=min(bottom.max_position_embeddings, top.max_position_embeddings),
        **rules,
        **ids,
    )


def _as_config(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    values = dict(given)
    return AutoConfig.for_model(values.pop("model_type"), **values)


AutoConfig.register(StitchedConfig.model_type, StitchedConfig)
