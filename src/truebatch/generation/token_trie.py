"""A few texts as the only ones a generation may give: after each token, which tokens may follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truebatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenTrie:
    """Texts by their tokens; none of them is the beginning of another. Make it with `make_token_trie`."""

    follows: Mapping[tuple[int, ...], frozenset[int]]
    """For every beginning that goes on: the tokens that may follow it."""
    depth: int
    """Tokens of the longest text."""

    def is_whole(self, new: Sequence[int]) -> bool:
        """Whether these tokens are one of the texts."""
        return tuple(new) not in self.follows

    def mask(self, texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Logits [B, V] in which only the tokens that may follow each row's text are left."""
        rows, ids = [], []
        for row, new in enumerate(texts):
            allowed = sorted(self.follows[tuple(new)])
            rows += [row] * len(allowed)
            ids += allowed
        at = torch.tensor(rows, device=logits.device), torch.tensor(ids, device=logits.device)
        return torch.full_like(logits, -torch.inf).index_put(at, logits[at])


def make_token_trie(texts: Iterable[Sequence[int]]) -> TokenTrie:
    """The trie of the tokens of some texts."""
    follows: dict[tuple[int, ...], set[int]] = {}
    whole = {tuple(text) for text in texts}
    for text in whole:
        for at in range(len(text)):
            follows.setdefault(text[:at], set()).add(text[at])
    clash = next((text for text in sorted(whole) if not text or text in follows), None)
    if clash is not None or not whole:
        raise ConfigError(
            "the texts to choose from must differ before one of them ends",
            seen=f"tokens {list(clash or ())}",
            do="choose texts of which none is the beginning of another",
        )
    return TokenTrie({path: frozenset(new) for path, new in follows.items()}, max(map(len, whole)))
