"""Prompts end to end in one row, as a model takes them: made on the host, sent once, nothing waits for the card."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from truebatch.generation.prompts import Prompt
from truebatch.hf.decoding import HFDecoder, image_marks, is_of_tokens
from truebatch.hf.images import image_token_id
from truebatch.tensors.sending import send


def row_inputs(
    decoder: HFDecoder, prompts: Sequence[Prompt], alone: Sequence[Tensor], cells: int, device: torch.device
) -> dict[str, Tensor]:
    """Tokens [1, cells], their positions as in `alone` ([1, cells] or [3, 1, cells]), and what stands beside them.

    Cells behind the last prompt hold a token that is no image, at position 0.
    """
    ids = torch.full((cells,), _filler(decoder.model), dtype=torch.int64)
    tokens = torch.tensor([token for prompt in prompts for token in prompt.ids], dtype=torch.int64)
    ids[: len(tokens)] = tokens
    positions = torch.cat(list(alone))
    positions = pad(
        positions.T if positions.ndim == 2 else positions, (0, cells - len(tokens))
    )  # [cells] or [3, cells]
    row = send([ids], device)[None]
    inputs = {"input_ids": row, "position_ids": send([positions.contiguous()], device).unsqueeze(-2)}
    names = dict.fromkeys(name for prompt in prompts for name in prompt.inputs)
    inputs |= {name: _beside(name, prompts, cells, device) for name in names}
    if names:
        inputs = {**image_marks(decoder, row.eq(image_token_id(decoder.model) or 0)), **inputs}
    return inputs


def _beside(name: str, prompts: Sequence[Prompt], cells: int, device: torch.device) -> Tensor:
    """One entry a token lies with the tokens, everything else end to end."""
    values = [prompt.inputs.get(name) for prompt in prompts]
    given = send([value for value in values if value is not None], device)
    return pad(given[None], (0, cells - len(given))) if is_of_tokens(values, prompts) else given


def _filler(model: nn.Module) -> int:
    return 1 if image_token_id(model) == 0 else 0
