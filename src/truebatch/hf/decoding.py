"""Any Hugging Face causal language model as a `Decoder`: left padding, explicit positions, rows taken from its cache.

prompts -> ids, attention_mask, position_ids -> forward -> logits of the last cell + cache -> one cell at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError, ConfigError
from truebatch.generation.prompts import Prompt, pad_left
from truebatch.hf.finetuning.models import num_positions
from truebatch.hf.inputs import Border, read_border


@dataclass(frozen=True, slots=True, eq=False)
class HFDecoder:
    """Continues ragged prompts with a Hugging Face model in evaluation mode, each as if it were alone."""

    model: nn.Module
    end_ids: frozenset[int]
    max_length: int | None
    border: Border

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, HFSession]:
        """One forward pass over all prompts, padded on the left; [B, V] logits of what follows."""
        if self.model.training:
            raise BatchError(
                "the model is in training mode, where dropout would change what it says",
                seen=f"{type(self.model).__name__}.training is True",
                do="call model.eval() first",
            )
        ids, is_real = pad_left(prompts, next(self.model.parameters()).device)
        session = HFSession(self, is_real)
        return session.forward(ids, _beside(prompts, is_real)), session


def hf_decoder(model: nn.Module, *, end_ids: Iterable[int] | None = None) -> HFDecoder:
    """The decoder of a causal model; by default a text ends where the model's own generation settings say."""
    config: Any = getattr(model, "config", None)
    ends = _own_end_ids(model) if end_ids is None else end_ids
    return HFDecoder(model, frozenset(int(i) for i in ends), num_positions(config), read_border(model))


class HFSession:
    """Rows that are being continued, with the model's cache of them."""

    def __init__(self, decoder: HFDecoder, is_real: Tensor) -> None:
        self._decoder = decoder
        self._is_real = is_real  # [B, S] of all cells, old and new
        self._cache: Any = None

    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every row; [B, V] logits of what follows."""
        new = torch.ones_like(self._is_real[:, :1])
        self._is_real = torch.cat([self._is_real, new], dim=1)
        return self.forward(tokens[:, None], {})

    def select(self, rows: Tensor, /) -> None:
        """Go on with these rows."""
        self._is_real = self._is_real[rows]
        self._cache.reorder_cache(rows)

    def forward(self, ids: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
        """The last `ids.shape[1]` cells of every row, behind those in the cache."""
        border = self._decoder.border
        positions = (self._is_real.long().cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs = {
            "attention_mask": self._is_real.long(),
            "position_ids": positions + border.first_position,
            "logits_to_keep": 1,
            "past_key_values": self._cache,
            "use_cache": True,
            "return_dict": True,
        }
        if border.has_grid_positions:
            del inputs["position_ids"]  # derived from the images
        known = {name: value for name, value in inputs.items() if name in border.accepts}
        out = self._decoder.model(input_ids=ids, **known, **beside)
        self._cache = _cache_of(out, self._decoder.model)
        logits: Tensor = out.logits[:, -1]
        return logits


def _cache_of(out: Any, model: nn.Module) -> Any:
    cache = getattr(out, "past_key_values", None)
    if not hasattr(cache, "reorder_cache"):
        raise ConfigError(
            "this model keeps no cache that rows can be taken from",
            seen=f"{type(model).__name__} gives past_key_values of type {type(cache).__name__}",
            do="use a model with a key-value cache of transformers' own kind",
        )
    return cache


def _beside(prompts: Sequence[Prompt], is_real: Tensor) -> dict[str, Tensor]:
    """Further inputs: one entry a token is padded with the tokens, everything else is laid end to end."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.inputs)
    return {name: _laid(name, prompts, is_real) for name in names}


def _laid(name: str, prompts: Sequence[Prompt], is_real: Tensor) -> Tensor:
    values = [prompt.inputs.get(name) for prompt in prompts]
    given = [value.to(is_real.device) for value in values if value is not None]
    of_cells = [v is not None and v.ndim == 1 and len(v) == len(p.ids) for v, p in zip(values, prompts, strict=True)]
    if not all(of_cells):
        return torch.cat(given)
    out = torch.zeros(is_real.shape, dtype=given[0].dtype, device=is_real.device)
    out[is_real] = torch.cat(given)
    return out


def _own_end_ids(model: nn.Module) -> list[int]:
    for settings in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [int(found)]
    return []
