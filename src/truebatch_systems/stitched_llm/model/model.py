"""Two donors as one causal language model: any batch size, padded left or right, packed, with a cache.

ids -> bottom donor (no gradients) -> adapter (fp32) -> top donor -> output layer

Each donor is its own base model of transformers: it makes its own 4-D mask, rotary table and cache from the same 2-D
mask and the same positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from truebatch.attention.causal_mask import require_4d_mask
from truebatch.errors import AttentionError, ConfigError
from truebatch.hf.heads.lm_head import logit_rule_of
from truebatch_systems.stitched_llm.model.adapter import StitchAdapter
from truebatch_systems.stitched_llm.model.hf_config import StitchedConfig
from truebatch_systems.stitched_llm.model.kv_cache import StitchedCache, cache_for
from truebatch_systems.stitched_llm.model.respell import Respelling, first_cells, real_cells

_NOT_FOR_DONORS = ("num_items_in_batch", "shift_labels", "return_dict", "cache_position")


class StitchedForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The bottom of one donor, an adapter, and the top of another; `stitch` makes one from donors.

    `vocabulary` is the map of ids its output layer was re-indexed by, `lora` rank and alpha of matrices in its top.
    """

    config_class = StitchedConfig
    base_model_prefix = "stitched"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: StitchedConfig) -> None:
        super().__init__(config)
        self.bottom = AutoModel.from_config(config.bottom, trust_remote_code=False)
        self.bottom.norm = nn.Identity()
        self.adapter = StitchAdapter(config.adapter_shape)
        self.top = AutoModel.from_config(config.top, trust_remote_code=False)
        self.top.embed_tokens = None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bool(config.origin.get("head_bias")))
        self.config.bottom, self.config.top = self.bottom.config, self.top.config
        self.loss_type = "ForCausalLM"
        self.vocabulary: Tensor | None = None
        self.lora: tuple[int, float] | None = None
        sizes = config.origin.get("respelling")
        self.respelling: Respelling | None = None if sizes is None else Respelling(*sizes)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal language model of transformers; `attention_mask` is the tokenizer's 2-D one.

        With `num_items_in_batch` the loss is the sum over labels divided by it, so that accumulation is a cut.
        """
        below_config = None if self.respelling is not None else self.config.bottom
        cache = cache_for(past_key_values, below_config, self.config.top, use_cache=use_cache)
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None, "input_ids or inputs_embeds"
        rows, cells = given.shape[:2]
        _check_mask(attention_mask, rows, cells, past=0 if cache is None else cache.get_seq_length())
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            position_ids = _positions(attention_mask)[:, -cells:]
        passed = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DONORS}
        passed |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": cache is not None}
        with torch.no_grad():  # nothing below the adapter is trained
            if self.respelling is not None:
                below = self._respelled(input_ids, attention_mask, position_ids, cache)
            else:
                below = self.bottom(
                    input_ids=input_ids, inputs_embeds=inputs_embeds, past_key_values=cache and cache.bottom, **passed
                ).last_hidden_state
        joined = self.adapter(below).to(self._top_dtype(below))
        above = self.top(inputs_embeds=joined, past_key_values=cache and cache.top, **passed)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self._logits(above.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            counted = {name: kwargs[name] for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def stream_below(self, ids: Tensor, is_real: Tensor) -> Tensor:
        """[B, L, D]: what the adapter is given, for rows padded on either side."""
        if self.respelling is not None:
            return self._respelled(ids, is_real, None, None)
        found: Tensor = self.bottom(input_ids=ids, attention_mask=is_real, use_cache=False).last_hidden_state
        return found

    def _respelled(
        self, ids: Tensor | None, mask: Tensor | None, position_ids: Tensor | None, cache: StitchedCache | None
    ) -> Tensor:
        """The stream of the bottom donor, which reads every id in tokens of its own; it keeps no cache: it is small."""
        if ids is None or self.respelling is None:
            raise ConfigError(
                "donors of two tokenizers read ids", seen="inputs_embeds", do="give input_ids of the top donor"
            )
        cells, is_real = ids.shape[1], real_cells(ids, mask)
        if cache is not None:
            ids, is_real = cache.remember(ids, is_real)
            position_ids = None  # a row with a cache is one sample
        is_first = first_cells(is_real, position_ids)
        return self.respelling.stream(self._read_below, ids, is_real, is_first)[:, -cells:]

    def _read_below(self, ids: Tensor, is_real: Tensor) -> Tensor:
        found: Tensor = self.bottom(input_ids=ids, attention_mask=is_real, use_cache=False).last_hidden_state
        return found

    def _top_dtype(self, below: Tensor) -> torch.dtype:
        found = next((p.dtype for p in self.top.parameters() if p.dtype.is_floating_point), below.dtype)
        return found if isinstance(found, torch.dtype) else below.dtype

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        rule = logit_rule_of(self)
        logits = logits if rule.scale == 1.0 else logits * rule.scale
        return logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)

    def train(self, mode: bool = True) -> StitchedForCausalLM:
        """The meaning it has in PyTorch; the bottom donor stays in eval mode, and donors have no dropout."""
        super().train(mode)
        self.bottom.eval()
        return self

    def get_input_embeddings(self) -> nn.Module:
        """Of the bottom donor; none where ids are those of the top one, which looks none of them up."""
        if self.respelling is not None:
            raise NotImplementedError(
                "ids of the top donor are spelled in tokens of the bottom one before they are looked up"
            )
        found: nn.Module = self.bottom.embed_tokens
        return found

    def get_output_embeddings(self) -> nn.Module:
        """Of the top donor."""
        return self.lm_head

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        # Only where it pays: below the adapter nothing is kept for backward anyway.
        self.top._set_gradient_checkpointing(*args, **kwargs)

    def trainable_names(self) -> list[str]:
        """Parameters that training changes."""
        return [name for name, p in self.named_parameters() if p.requires_grad]


def _check_mask(mask: Tensor | None, rows: int, cells: int, *, past: int) -> None:
    """Refuse a mask that a donor would misread or stop at with words about broadcasting."""
    if mask is not None and mask.ndim != 2:
        require_4d_mask(mask, rows=rows, query_length=cells)
    elif mask is not None and tuple(mask.shape) != (rows, past + cells):
        raise AttentionError(
            "the attention mask does not fit the tokens",
            seen=f"mask {list(mask.shape)} for ids [{rows}, {cells}]" + (f" after {past} in the cache" if past else ""),
            do=f"give the tokenizer's mask, shape [{rows}, {past + cells}]: 1 at real tokens, 0 at padding",
        )


def _positions(is_real: Tensor) -> Tensor:
    """[B, L]: place of every real cell within its row, wherever the padding is; 0 before the first."""
    return (is_real.long().cumsum(-1) - 1).clamp(min=0)


AutoModelForCausalLM.register(StitchedConfig, StitchedForCausalLM)
