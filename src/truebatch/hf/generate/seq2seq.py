"""Any Hugging Face encoder-decoder as a `Decoder`: sources padded on the right, every target from its first cell on.

sources -> encoder, once -> start token -> decoder with its cache of both attentions -> one token at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import BaseModelOutput

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.errors import BatchError, DataError
from truebatch.generation.interface import Prompt
from truebatch.hf.forward_inputs import inspect_forward
from truebatch.hf.heads.heads import head_of
from truebatch.hf.pretrained import num_positions


@dataclass(frozen=True, slots=True, eq=False)
class Seq2SeqDecoder:
    """Writes a text for each source with an encoder-decoder in evaluation mode, each as if it were alone."""

    model: nn.Module
    end_ids: frozenset[int]
    start_id: int
    num_positions: int | None
    """Of the encoder, and again of the decoder."""

    @property
    def max_length(self) -> int | None:
        """Source and target take positions of their own, so their sum has no limit."""
        return None

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Seq2SeqSession]:
        """Encode all sources at once; [B, V] logits of the first token of every target."""
        if self.model.training:
            raise BatchError(
                "the model is in training mode, where dropout would change what it says",
                seen=f"{type(self.model).__name__}.training is True",
                do="call model.eval() first",
            )
        self._check_lengths(prompts)
        model: Any = self.model
        device = next(self.model.parameters()).device
        rows = [torch.tensor(prompt.ids, dtype=torch.int64) for prompt in prompts]
        is_real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
        ids = pad_sequence(rows, batch_first=True).to(device)
        with without_cudnn_sdpa(device):
            encoded = model.get_encoder()(input_ids=ids, attention_mask=is_real)[0]
        session = Seq2SeqSession(self.model, encoded, is_real)
        return session.advance(torch.full((len(rows),), self.start_id, device=device)), session

    def _check_lengths(self, prompts: Sequence[Prompt]) -> None:
        for number, prompt in enumerate(prompts):
            if self.num_positions is not None and len(prompt.ids) > self.num_positions:
                raise DataError(
                    "a source is longer than the model has positions for",
                    seen=f"prompt {number} has {len(prompt.ids):,} tokens, the model has {self.num_positions:,} positions",
                    do=f"shorten it to at most {self.num_positions:,} tokens",
                )


def seq2seq_decoder(model: nn.Module, *, end_ids: Iterable[int]) -> Seq2SeqDecoder:
    """The decoder of an encoder-decoder; targets begin with the token that training began them with."""
    config: Any = model.config
    return Seq2SeqDecoder(model, frozenset(end_ids), head_of(model).start_id, num_positions(config))


class Seq2SeqSession:
    """Targets that are being written, with what the encoder made of their sources."""

    def __init__(self, model: nn.Module, encoded: Tensor, is_real: Tensor) -> None:
        self._model = model
        self._encoded = encoded  # [B, S, D]
        self._is_real = is_real  # [B, S]
        self._cache: Any = None
        self._accepts = inspect_forward(model).accepts

    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every target; [B, V] logits of what follows."""
        inputs = {"past_key_values": self._cache, "use_cache": True, "return_dict": True}
        known = {name: value for name, value in inputs.items() if name in self._accepts or name == "return_dict"}
        with without_cudnn_sdpa(tokens.device):
            out: Any = self._model(
                encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
                attention_mask=self._is_real,
                decoder_input_ids=tokens[:, None],
                **known,
            )
        self._cache = out.past_key_values
        logits: Tensor = out.logits[:, -1]
        return logits

    def select(self, rows: Tensor, /) -> None:
        """Go on with these rows."""
        self._encoded, self._is_real = self._encoded[rows], self._is_real[rows]
        self._cache.reorder_cache(rows)
