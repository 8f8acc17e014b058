"""Shared-prefix KV cache: the common prefix is prefilled once, and only the rest is run for each prompt.

common tokens -> one row through the model -> cache, kept -> a row a prompt -> the rest, padded behind the prefix
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from truebatch.generation.interface import DecoderWrapper, Prompt
from truebatch.hf.generate.decoder import FirstCells, HFDecoder, HFSession, first_cells
from truebatch.hf.image_fields import image_token_id

LEAST = 16
"""A shorter prefix is not worth a separate forward pass."""
KEPT = 4
"""Number of prefixes whose cache is kept."""


@dataclass(slots=True)
class PrefixDecoder(DecoderWrapper):
    """A decoder that prefills the common prefix of a batch once; results are those of `decoder`."""

    decoder: HFDecoder
    reused: int = 0
    """Tokens served from the cache."""
    why: str = ""
    """What spoke against it, where prompts had a beginning in common."""
    _known: OrderedDict[tuple[int, ...], Any] = field(default_factory=OrderedDict)

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, HFSession]:
        """The logits of what follows each prompt, and the rows."""
        length = common_beginning(prompts, image_token_id(self.decoder.model))
        if length < LEAST or len(prompts) < 2:
            return self.decoder.start(prompts)
        self.why = self._why_not()
        if self.why:
            return self.decoder.start(prompts)
        prefix = prompts[0].ids[:length]
        is_known = prefix in self._known
        cache = copy.deepcopy(self._read(prefix))
        cache.reorder_cache(torch.zeros(len(prompts), dtype=torch.int64, device=_device(self.decoder)))
        self.reused += length * (len(prompts) - (0 if is_known else 1))
        rest = _behind(first_cells(self.decoder, prompts), length)
        session = HFSession(self.decoder, rest.is_real, rest.place, cache)
        return session.forward(rest.ids, rest.positions, rest.beside), session

    def _why_not(self) -> str:
        """Why a beginning is not the same alone, if it is not."""
        if "position_ids" not in self.decoder.border.accepts:
            return "its forward takes no position_ids, so padding behind a beginning would be counted"
        if self.decoder.rotary:
            return "the angles of its positions follow the length of a row"
        return "the model is in training mode" if self.decoder.model.training else ""

    def _read(self, prefix: tuple[int, ...]) -> Any:
        if prefix not in self._known:
            alone = first_cells(self.decoder, [Prompt(ids=prefix, key=0)])
            session = HFSession(self.decoder, alone.is_real, alone.place)
            session.forward(alone.ids, alone.positions, alone.beside)
            self._known[prefix] = session.cache
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(prefix)
        return self._known[prefix]


def common_beginning(prompts: Sequence[Prompt], image_token: int | None) -> int:
    """How many tokens all prompts share at their beginning, before any image, leaving at least one token of each."""
    first, last = min(p.ids for p in prompts), max(p.ids for p in prompts)
    most = min(len(p.ids) for p in prompts) - 1
    shared = next((at for at in range(most) if first[at] != last[at]), most)
    return next((at for at in range(shared) if first[at] == image_token), shared)


def _behind(first: FirstCells, length: int) -> FirstCells:
    """The cells behind the prefix: rows keep their padding, now between the prefix and the rest."""
    tails, width = first.is_real.sum(dim=1) - length, first.ids.shape[1]
    keep = int(tails.max())
    columns = torch.arange(width - keep, width, device=first.ids.device)
    is_tail = columns[None, :] >= width - tails[:, None]
    ids = torch.where(is_tail, first.ids[:, columns], 0)
    is_real = torch.cat([torch.ones(len(ids), length, dtype=torch.bool, device=ids.device), is_tail], dim=1)
    beside = {
        name: value[:, columns] * is_tail if _is_of_cells(value, first) else value
        for name, value in first.beside.items()
    }
    return replace(first, ids=ids, is_real=is_real, positions=first.positions[..., columns], beside=beside)


def _is_of_cells(value: Tensor, first: FirstCells) -> bool:
    return not value.is_floating_point() and value.shape == first.is_real.shape


def _device(decoder: HFDecoder) -> torch.device:
    return next(decoder.model.parameters()).device
