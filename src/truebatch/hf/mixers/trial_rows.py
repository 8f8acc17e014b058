"""A few short made-up samples for any model, alone and packed: what the trial of its modules is run on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from truebatch.batch.segments import Segments, cell_positions, packed_segments
from truebatch.hf.argument_names import handed_on
from truebatch.training.memory.oom import is_out_of_memory

LENGTHS = (7, 3, 19, 1, 12, 5)
TARGET_LENGTHS = (4, 9, 2, 6, 3, 5)
MARKED = slice(1, 4)
"""Cells of a sample that stand for an image."""
TYPE_WORDS = ("token_type_ids", "mm_token_type_ids")
FEWER = 4
"""The second, shorter row has this many of the samples: what grows with a row shows where its cells lie."""


@contextmanager
def without_router_outputs(model: nn.Module) -> Iterator[None]:
    """While open, a model of experts gives its results alone: with its routers' logits a loss would come first."""
    configs: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    asked = list({id(c): c for c in configs if getattr(c, "output_router_logits", False)}.values())
    for config in asked:
        config.output_router_logits = False
    try:
        yield
    finally:
        for config in asked:
            config.output_router_logits = True


@dataclass(frozen=True, slots=True, eq=False)
class TrialRows:
    """Samples of a trial: their tokens, and those of their answers in an encoder-decoder."""

    tokens: Sequence[Tensor]
    targets: Sequence[Tensor] | None
    has_types: bool = False
    """Some cells are marked as those of an image, for models that attend both ways inside of one."""

    def sizes(self) -> dict[str, int]:
        """Axis -> cells of the packed row."""
        found = {"cells": sum(map(len, self.tokens))}
        return found if self.targets is None else {**found, "targets": sum(map(len, self.targets))}

    def length(self, axis: str, at: int) -> int:
        """Cells of one sample."""
        return len(self._of(axis)[at])

    def first(self, axis: str, at: int) -> int:
        """Its first cell in the packed row."""
        return sum(map(len, self._of(axis)[:at]))

    def _of(self, axis: str) -> Sequence[Tensor]:
        found = self.tokens if axis == "cells" else self.targets
        assert found is not None
        return found

    def fewer(self) -> TrialRows:
        """The first few."""
        return TrialRows(self.tokens[:FEWER], None if self.targets is None else self.targets[:FEWER], self.has_types)


def trial_rows(model: nn.Module) -> TrialRows:
    """Samples of ids that mean nothing special to this model."""
    config: Any = model.config
    ids, device = _plain_ids(config), next(model.parameters()).device
    is_two_sided = "decoder_input_ids" in inspect.signature(type(model).forward).parameters
    two_sided = is_two_sided and getattr(config, "is_encoder_decoder", False)

    def drawn(lengths: Sequence[int], first: int) -> list[Tensor]:
        at = torch.arange(first, first + sum(lengths)) * 7919 % len(ids)
        return list(torch.split(ids[at].to(device), list(lengths)))

    rows = TrialRows(drawn(LENGTHS, 11), drawn(TARGET_LENGTHS, 211) if two_sided else None)
    typed = replace(rows, has_types=True)
    return typed if takes_types(model) and _runs(model, typed) else rows


def takes_types(model: nn.Module) -> bool:
    """Whether a model that sees images is told which cells are theirs."""
    accepted = inspect.signature(type(model).forward).parameters
    return "pixel_values" in accepted and any(name in accepted for name in TYPE_WORDS)


def _runs(model: nn.Module, rows: TrialRows) -> bool:
    """Whether the model takes marked cells without an image."""
    try:
        with torch.no_grad():
            model(**alone_inputs(model, rows, 0))
    except Exception as error:  # it looks for the image, and says so in its own words
        if is_out_of_memory(error):
            raise
        return False
    return True


def _types(tokens: Tensor) -> Tensor:
    """[n]: 1 in the cells that stand for an image."""
    types = torch.zeros_like(tokens)
    types[MARKED] = 1
    return types


def alone_inputs(model: nn.Module, rows: TrialRows, at: int, *, positioned: bool = False) -> dict[str, Any]:
    """What a tokenizer gives with one sample; `positioned`: and the positions that it has in a packed row."""
    tokens = rows.tokens[at][None]
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    if positioned:
        given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None] + first_position(model)
    if rows.has_types:
        given |= dict.fromkeys(TYPE_WORDS, _types(rows.tokens[at])[None])
    if rows.targets is not None:
        given["decoder_input_ids"] = rows.targets[at][None]
    return _taken(model, given)


def packed_trial_inputs(model: nn.Module, rows: TrialRows) -> dict[str, Any]:
    """All samples end to end, with positions where the model takes them; and the segment tables."""
    device = rows.tokens[0].device
    table = _table(rows.tokens, device)
    given: dict[str, Any] = {
        "input_ids": torch.cat(list(rows.tokens))[None],
        "position_ids": cell_positions(table) + first_position(model),
        "use_cache": False,
    }
    if getattr(model.config, "type_vocab_size", 0):
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    if rows.has_types:
        given |= dict.fromkeys(TYPE_WORDS, torch.cat([_types(tokens) for tokens in rows.tokens])[None])
    if rows.targets is not None:
        given["decoder_input_ids"] = torch.cat(list(rows.targets))[None]
        given["decoder_position_ids"] = cell_positions(_table(rows.targets, device))
    return _taken(model, given)


def tables_of(rows: TrialRows) -> tuple[Segments, Segments | None]:
    """The segment tables of the packed rows."""
    device = rows.tokens[0].device
    return _table(rows.tokens, device), None if rows.targets is None else _table(rows.targets, device)


def first_position(model: nn.Module) -> int:
    """The position of a sample's first token; RoBERTa and its kin count from `padding_idx + 1`.

    Others say it in the buffer that they count with, which is read once. A model without values has none to read.
    """
    found = _first_positions.get(model)
    if found is not None:
        return found
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    counted = [b.flatten() for name, b in model.named_buffers() if name.endswith("embeddings.position_ids")]
    if any(b.is_meta or isinstance(b, FakeTensor) for b in counted):
        return 0
    starts = {int(b[0]) for b in counted if len(b) and bool((b.diff() == 1).all())}
    _first_positions[model] = starts.pop() if len(starts) == 1 else 0
    return _first_positions[model]


_first_positions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _table(parts: Sequence[Tensor], device: torch.device) -> Segments:
    return packed_segments([len(part) for part in parts]).to(device)


def _taken(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    named = inspect.signature(type(model).forward).parameters  # others may hold it behind a function of their own
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    known = {"use_cache", *named, *handed_on(model)} if takes_any else set(named)
    return {name: value for name, value in given.items() if name in known}


def _plain_ids(config: Any) -> Tensor:
    vocabulary = int(getattr(config.get_text_config(), "vocab_size", 0) or config.vocab_size)
    special = set(_special_ids(config))
    return torch.tensor([i for i in range(min(4, vocabulary - 1), vocabulary) if i not in special])


def _special_ids(config: Any) -> list[int]:
    found: list[int] = []
    for name, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            found += _special_ids(value)
        elif "token" in name:
            found += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int)]
    return found
