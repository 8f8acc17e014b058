"""A language model's layers over padded rows that begin alike: what rows share is computed once, nothing is for padding.

padded ids and mask -> the tokens of each row -> trees -> packed rows -> hidden states -> back into the padded rows

Whatever calls the model (a head, a loss, a trainer) gets hidden states in the rows it gave, and need not know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from truebatch.errors import ConfigError, LawError
from truebatch.hf.attention.registration import NAME
from truebatch.hf.heads.heads import ModelHead, head_of, packed_part
from truebatch.hf.preference.logprobs import CELLS, bare_model
from truebatch.hf.preference.sharing import RowWay, row_way
from truebatch.hf.preference.tree_rows import CompletionRows, call_inputs, packed_tree_row
from truebatch.planning.trees.pack_trees import plan_tree_rows
from truebatch.planning.trees.prefix_trees import grow_trees

_log = logging.getLogger(__name__)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5}
HALF = 6e-2
"""In half precision rounding alone moves the last hidden states by some of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPrompts:
    """How rows are shared."""

    cells: int = CELLS
    """Cells of one forward pass at most; what more a call has is computed again in backward, a row at a time."""
    check_rows: int = 2
    """Rows of the first call that are compared with the model over each of them alone; 0 leaves the check out."""

    def __post_init__(self) -> None:
        if self.cells < 1 or self.check_rows < 0:
            raise ConfigError(
                "cells are at least 1, and rows to check at least 0",
                seen=f"cells={self.cells}, check_rows={self.check_rows}",
                do="leave them out for the defaults",
            )


@dataclass(slots=True, eq=False)
class SharedBackbone:
    """The replacement of a backbone's forward pass."""

    model: Any
    """With its head."""
    backbone: nn.Module
    original: Callable[..., Any]
    config: SharedPrompts
    head: ModelHead
    kind: type[Any] = BaseModelOutputWithPast
    """What the backbone gives."""
    is_inside: bool = False
    is_checked: bool = False
    widest: int = 0
    """Cells of the widest packed row of the last call."""
    longest: int = 0
    """Tokens of the longest row that it was given: no packed row can be narrower."""
    said: set[str] = field(default_factory=set)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Packed where a call reads padded rows without a cache; anything else as before."""
        ids, mask = named.get("input_ids", args[0] if args else None), named.get("attention_mask")
        is_plain = isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == ids.shape
        if self.is_inside or not is_plain or named.get("use_cache") is not False or len(args) > 1:
            return self.original(*args, **named)
        if named.get("past_key_values") is not None or named.get("inputs_embeds") is not None:
            return self.original(*args, **named)
        assert isinstance(ids, Tensor) and isinstance(mask, Tensor)  # noqa: PT018
        spans = _spans(mask)
        longest = max((end - first for first, end in spans), default=0)
        way = self._way(longest) if spans else None
        if way is None or way.way == "padded":
            self._say(f"rows stay padded: {way.why if way else 'a row has a gap, or no token'}")
            return self.original(*args, **named)
        if way.why:
            self._say(f"rows are packed, nothing is shared: {way.why}")
        found = self._read(ids, spans, shares=way.way == "shared")
        if not self.is_checked and self.config.check_rows:
            self._check(ids, spans, found.detach())
        return self.kind(last_hidden_state=found)

    def _way(self, longest: int) -> RowWay:
        with self._as_before():  # its trials call the model
            return row_way(self.head, self.model, longest=longest)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        was_inside, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = was_inside

    def _say(self, words: str) -> None:
        if words not in self.said:
            self.said.add(words)
            _log.warning("truebatch: %s", words)

    def _read(self, ids: Tensor, spans: list[tuple[int, int]], *, shares: bool) -> Tensor:
        """[B, T, D] of padded rows; 0 in cells of padding."""
        host = ids.tolist()
        texts = [host[row][first:end] for row, (first, end) in enumerate(spans)]
        trees = grow_trees(texts, [[] for _ in texts], share="beginnings" if shares else "nothing")
        planned = plan_tree_rows(trees, self.config.cells)
        self.longest = max(map(len, texts))
        self.widest = max(int(trees.lengths[row.nodes].sum()) for row in planned)
        cells_of, parts, before = np.zeros(ids.shape, dtype=np.int64), [], 1
        for row in planned:
            rows = packed_tree_row(trees, row).to(ids.device)
            for one, path in row.paths(trees):
                first, end = spans[one]
                cells_of[one, first:end] = before + path
            parts.append(self._hidden(rows, again=len(planned) > 1))
            before += rows.input_ids.shape[1]
        width = parts[0].shape[-1]
        whole = torch.cat([parts[0].new_zeros(1, width), *parts])
        found = whole.index_select(0, torch.from_numpy(cells_of.ravel()).to(ids.device))
        return found.view(*ids.shape, width)

    def _hidden(self, rows: CompletionRows, *, again: bool) -> Tensor:
        """[T, D] of one packed row; `again`: nothing but its input is kept until backward."""

        def run(_: Tensor) -> Tensor:
            output = self._call(**call_inputs(self.head, self.model, rows))
            self.kind = type(output)
            hidden: Tensor = output[0]
            return hidden[0]

        if not (again and torch.is_grad_enabled()):
            return run(rows.input_ids)
        found: Tensor = checkpoint(run, rows.input_ids, use_reentrant=False)
        return found

    def _call(self, **named: Any) -> Any:
        with self._as_before():
            return self.backbone(**named)

    @torch.no_grad()
    def _check(self, ids: Tensor, spans: list[tuple[int, int]], found: Tensor) -> None:
        """A few rows alone, without padding, as plain transformers reads them."""
        self.is_checked = True
        some = sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1])[: self.config.check_rows]
        worst = 0.0
        for row in some:
            first, end = spans[row]
            text = ids[row : row + 1, first:end]
            alone = self._call(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False)[0][0].float()
            worst = max(worst, float((found[row, first:end].float() - alone).norm() / alone.norm()))
        if not worst <= TOLERANCE.get(found.dtype, HALF):
            raise LawError(
                "rows that share their beginnings give other hidden states than each of them alone",
                seen=f"{len(some)} rows, difference {worst:.1e}",
                do="train without the mixin, and report the model",
            )
        _log.warning("truebatch: equality: checked on %d rows, hidden states %.0e", len(some), worst)


def share_prompts(model: nn.Module, config: SharedPrompts | None = None) -> SharedBackbone:
    """Let the backbone of a Hugging Face model compute what padded rows share once, in place.

    Its attention becomes `truebatch`, which serves generation as sdpa does.
    """
    inner = bare_model(model)
    head = head_of(inner)
    part: Any = inner.base_model
    known = vars(part).get("forward")
    if isinstance(known, SharedBackbone):
        return known
    if not head.reads_left_to_right or packed_part(head, inner) not in (inner, part):
        raise ConfigError(
            "prompts are shared in models that read from left to right",
            seen=f"{type(inner).__name__}, a head of kind {head.kind.name!r}",
            do="train it without the mixin",
        )
    if inner.config._attn_implementation != NAME:
        inner.set_attn_implementation(NAME)
    shared = SharedBackbone(
        model=inner, backbone=part, original=part.forward, config=config or SharedPrompts(), head=head
    )
    part.forward = shared
    return shared


def _spans(mask: Tensor) -> list[tuple[int, int]]:
    """First cell and end of every row; none where a row has a gap or no token."""
    real = mask.bool()
    first, number = real.int().argmax(1), real.sum(1)
    last = real.shape[1] - real.flip(1).int().argmax(1)
    if not bool(((last - first == number) & (number > 0)).all()):
        return []
    return list(zip(first.tolist(), last.tolist(), strict=True))
