"""Two donors, two vocabularies: they must be one, or somebody says which id is which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import read_text
from truebatch_systems.stitched_llm.data.token_bytes import ids_of_bytes, special_ids
from truebatch_systems.stitched_llm.model.donors import Donor

_MOST_BYTES = 1 << 27

NOBODY = -1
"""In a map of ids: the other vocabulary has no such token."""
_NEVER = -30000.0
"""A logit that no softmax takes seriously, and that fp16 still holds."""


def refuse_other_vocabulary(bottom: Donor, top: Donor) -> None:
    """Raise unless the same id means the same token in both donors, as far as can be known."""
    if bottom.tokenizer is None or top.tokenizer is None:
        sizes = [donor.model.config.vocab_size for donor in (bottom, top)]
        if sizes[0] != sizes[1]:
            raise _refusal(bottom, top, f"vocabularies of {sizes[0]:,} and {sizes[1]:,} ids")
        return
    below, above = bottom.tokenizer.get_vocab(), top.tokenizer.get_vocab()
    if below == above:
        return
    different = sorted((i, token) for token, i in below.items() if above.get(token) != i)
    lost = [f"{token!r} is {i} below and {above.get(token)} above" for i, token in different[:1]]
    total = f"{len(different):,} of {len(below):,} tokens differ, {len(above):,} above"
    raise _refusal(bottom, top, "; ".join([*lost, total]))


def _refusal(bottom: Donor, top: Donor, seen: str) -> ConfigError:
    return ConfigError(
        f"{bottom.name} and {top.name} do not speak the same vocabulary",
        seen=seen,
        do="stitch donors of one tokenizer; or let each read the text in its own tokens (--set vocabulary=retokenize), "
        "match tokens by their bytes (--set vocabulary=by_text), or give a map of ids (--set vocabulary_map=FILE)",
    )


def match_by_bytes(bottom: Any, top: Any, *, size: int, top_size: int | None = None) -> Tensor:
    """[size] int64: for every id of the bottom tokenizer the id of the same bytes in the top one, or -1.

    Tokens that a tokenizer has and its model does not, such as padding that was added, have no partner.

    Special tokens are matched by their role. Of several tokens with the same bytes the one that a text gets has the
    partner: a piece of one byte is written where nothing else spells it.
    """
    below, above = ids_of_bytes(bottom), ids_of_bytes(top)
    found = torch.full((size,), NOBODY, dtype=torch.int64)
    for spelled, number in below.items():
        if number < size:
            found[number] = above.get(spelled, NOBODY)
    roles = {role: number for role, number in special_ids(top).items() if top_size is None or number < top_size}
    for role, number in special_ids(bottom).items():
        if (
            number < size and found[number] == NOBODY
        ):  # a token of two roles, such as end and padding, has the first one's
            found[number] = roles.get(role, NOBODY)
    return found if top_size is None else found.masked_fill(found >= top_size, NOBODY)


def read_vocabulary_map(file: Path, *, size: int) -> Tensor:
    """The same from a JSON file: {"id below": id above}."""
    try:
        pairs = {int(a): _id(b) for a, b in json.loads(read_text(file, max_bytes=_MOST_BYTES)).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{file} is no map of ids", seen=str(error)[:200], do='write a JSON object: {"id below": id above, ...}'
        ) from error
    outside = [a for a in pairs if not 0 <= a < size]
    if outside:
        raise ConfigError(
            f"{file} names ids the bottom donor does not have",
            seen=f"id {outside[0]}, vocabulary {size:,}",
            do="check which donor is below",
        )
    found = torch.full((size,), NOBODY, dtype=torch.int64)
    found[list(pairs)] = torch.tensor(list(pairs.values()), dtype=torch.int64)
    return found


def _id(value: Any) -> int:
    """A token id; anything else would be another token without a word: 3.7 the third, -5 the fifth from the end."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no token id")
    return value


def head_in_vocabulary(head: nn.Linear, vocabulary: Tensor) -> nn.Linear:
    """The output layer of the top donor re-indexed: its logits stand at the ids of the bottom donor.

    Ids without a counterpart are never predicted. Tokens that only the top donor has take no part in the softmax.
    """
    if int(vocabulary.max()) >= head.out_features:
        raise ConfigError(
            "the map names ids the top donor does not have",
            seen=f"id {int(vocabulary.max())}, vocabulary {head.out_features:,}",
            do="check which donor is above",
        )
    is_known = vocabulary != NOBODY
    taken = torch.where(is_known, vocabulary, 0).to(head.weight.device)
    joined = nn.Linear(head.in_features, len(vocabulary), device="meta", dtype=head.weight.dtype)
    weight = head.weight.detach()[taken]
    bias = weight.new_zeros(len(vocabulary)) if head.bias is None else head.bias.detach()[taken]
    bias = bias.masked_fill(~is_known.to(bias.device), _NEVER)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined
