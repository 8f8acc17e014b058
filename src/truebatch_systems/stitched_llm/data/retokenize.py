"""The tokens of one tokenizer spelled in those of another, token by token, aligned by their bytes.

bytes of a token of the top donor -> the fewest tokens of the bottom donor that spell them -> a table, one row a token

Every token is spelled by itself, so what stands in front of a place never changes with what follows: reading a text at
once and writing it token by token give the bottom donor the same input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truebatch.errors import ConfigError
from truebatch_systems.stitched_llm.data.token_bytes import (
    begins_with_space,
    ids_of_bytes,
    special_ids,
    token_bytes,
)

Ids = tuple[int, ...]
_NONE = 0
"""Where a row of the table is shorter than the longest."""


@dataclass(frozen=True, slots=True, eq=False)
class Spelling:
    """For every id of the top donor: the ids of the bottom donor that spell it."""

    ids: Tensor
    """[V, m] int64, filled with 0 behind the last."""
    counts: Tensor
    """[V] how many there are, 1 or more."""
    first_ids: Tensor
    """[V, n] the same at the beginning of a text, with what the bottom donor's tokenizer puts there."""
    first_counts: Tensor
    num_unknown: int = 0
    """Ids of the top donor that the bottom donor can only read as unknown."""


def spell_in(bottom: Any, top: Any, *, size: int) -> Spelling:
    """How the bottom donor's tokenizer spells each of the `size` ids of the top donor."""
    pieces = ids_of_bytes(bottom)
    prefix = _beginning(bottom)
    roles = _roles(bottom, top)
    adds_space = begins_with_space(bottom)
    rows: list[Ids] = []
    first: list[Ids] = []
    unknown = 0
    for number, spelled in enumerate(_bytes_or_text(top, size)):
        found = roles.get(number) if number in roles else spell(spelled, pieces)
        unknown += found is None
        rows.append(found or _unknown(bottom, top, number))
        opened = spell(b" " + spelled, pieces) if adds_space and number not in roles and spelled[:1] != b" " else None
        start = opened or rows[-1]
        first.append(start if start[: len(prefix)] == prefix else (*prefix, *start))
    return Spelling(*_table(rows), *_table(first), num_unknown=unknown)


def spell(text: bytes, pieces: Mapping[bytes, int]) -> Ids | None:
    """The fewest pieces that spell these bytes, of several ways that with the lowest ids; None where there is no way."""
    longest = min(max(map(len, pieces), default=0), len(text))
    best: list[tuple[int, int, Ids] | None] = [(0, 0, ()), *[None] * len(text)]
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - longest), end):
            before, piece = best[start], pieces.get(text[start:end])
            if before is not None and piece is not None:
                way = (before[0] + 1, before[1] + piece, (*before[2], piece))
                known = best[end]
                best[end] = way if known is None or way < known else known
    last = best[-1]
    return last[2] if last is not None and text else None


def _bytes_or_text(top: Any, size: int) -> list[bytes]:
    """What every id stands for; a special token without a role for its own name, an id without a token for nothing."""
    names = {number: token for token, number in top.get_vocab().items()}
    return [
        spelled if spelled is not None else names.get(number, "").encode()
        for number, spelled in enumerate(token_bytes(top, size=size))
    ]


def _roles(bottom: Any, top: Any) -> dict[int, Ids]:
    """Special tokens of the top donor -> that of the bottom donor with the same role; of several roles, the end."""
    below = special_ids(bottom)
    order = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    above = special_ids(top)
    return {above[role]: (below[role],) for role in order if role in above and role in below}


def _beginning(tokenizer: Any) -> Ids:
    """What a tokenizer puts in front of every text."""
    special = set(tokenizer.all_special_ids)
    found: list[int] = []
    for number in tokenizer("a")["input_ids"]:
        if number not in special:
            break
        found.append(number)
    return tuple(found)


def _unknown(bottom: Any, top: Any, number: int) -> Ids:
    found = bottom.unk_token_id if bottom.unk_token_id is not None else bottom.eos_token_id
    if found is None:
        raise ConfigError(
            "the bottom donor cannot read a token of the top one",
            seen=f"id {number}, {top.convert_ids_to_tokens(number)!r}; no unknown token and no end below",
            do="use a bottom donor whose tokenizer spells every byte, or --set vocabulary=by_text",
        )
    return (int(found),)


def _table(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([len(row) for row in rows])
    table = torch.full((len(rows), int(counts.max())), _NONE)
    for number, row in enumerate(rows):
        table[number, : len(row)] = torch.tensor(row)
    return table, counts
