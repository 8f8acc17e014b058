"""The decoder interface: prompts in, pieces out, and what a model must provide.

Prompt -> Decoder.start -> Session: logits, advance by a token, keep some rows -> Piece
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from truebatch.errors import DataError
from truebatch.planning.keyed_rng import keyed_hash

Ended = Literal["end", "stop", "length", "room"]
"""end: end-of-text token. stop: a stop text. length: `max_new_tokens` reached. room: the model has no more
positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The tokens of the prompt."""

    ids: tuple[int, ...]
    key: int
    """The key of its random draws, see `key_prompts` and `key_samples`."""
    max_new_tokens: int | None = None
    """A lower limit than the settings' for this text."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Model inputs other than tokens, such as pixel values."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The next token of a text, its end, or both."""

    prompt: int
    """Number of the prompt, from 0."""
    token: int | None
    """None where the model ended the text: the end token is not part of it."""
    ended: Ended | None = None


class Session(Protocol):
    """Rows being decoded, with the model's state for them."""

    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every row, [B] -> the logits of what follows, [B, V]."""

    def select(self, rows: Tensor, /) -> None:
        """Keep these rows in this order; a row may occur several times, the others are dropped."""


class Decoder(Protocol):
    """A model that continues prompts of different lengths in one forward pass, each as if it were alone."""

    @property
    def end_ids(self) -> frozenset[int]:
        """End-of-text tokens."""

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a prompt and its continuation; None if there is no limit."""

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Session]:
        """The logits of what follows each prompt, [B, V], and the rows in the same order."""


class DecoderWrapper:
    """A decoder around another one, with the ends and the limit of the inner one."""

    __slots__ = ()
    decoder: Decoder

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.decoder.end_ids

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a prompt and its continuation together."""
        return self.decoder.max_length


def key_samples(seed: int, sample_ids: Sequence[int]) -> list[int]:
    """A key for each sample id: for callers whose prompts have ids of their own."""
    bits = keyed_hash(seed, 0, "generation", np.asarray(sample_ids, dtype=np.int64))
    return [int(key) for key in bits.view(np.int64)]


def key_prompts(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """A key for each prompt from its own tokens: the order of prompts does not matter, equal ones get different
    keys."""
    times: Counter[tuple[int, ...]] = Counter()
    ids = []
    for prompt in prompts:
        tokens = tuple(int(token) for token in prompt)
        text = f"{times[tokens]}:{','.join(map(str, tokens))}"
        ids.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True))
        times[tokens] += 1
    return key_samples(seed, ids)


def check_prompts(prompts: Sequence[Prompt], max_length: int | None) -> None:
    """Reject a prompt without tokens, or one that leaves no room for a new one."""
    for number, prompt in enumerate(prompts):
        if prompt.max_new_tokens is not None and prompt.max_new_tokens < 1:
            raise DataError(
                "a prompt allows no new tokens",
                seen=f"prompt {number}: max_new_tokens={prompt.max_new_tokens}",
                do="give 1 or more, or omit the prompt",
            )
        if not prompt.ids:
            raise DataError(
                "a prompt has no tokens", seen=f"prompt {number}", do="begin it with the token that opens a text"
            )
        if max_length is not None and len(prompt.ids) >= max_length:
            raise DataError(
                "a prompt leaves no room for new tokens",
                seen=f"prompt {number} has {len(prompt.ids):,} tokens, the model has {max_length:,} positions",
                do=f"shorten it to at most {max_length - 1:,} tokens",
            )


def group_prompts(prompts: Sequence[Prompt], rows: int) -> Iterator[list[int]]:
    """Numbers of the prompts that run together: at most `rows`, of similar length, so that there is little padding."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids))
    for first in range(0, len(order), rows):
        yield sorted(order[first : first + rows])


def pad_left(prompts: Sequence[Prompt], device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded tokens [B, T], and the mask of real ones, [B, T] bool."""
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    is_real = torch.zeros(ids.shape, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        first = longest - len(prompt.ids)
        ids[row, first:] = torch.tensor(prompt.ids, dtype=torch.int64)
        is_real[row, first:] = True
    return ids.to(device), is_real.to(device)


@torch.inference_mode()
def start_session(decoder: Decoder, prompts: Sequence[Prompt]) -> tuple[Tensor, Session]:
    """`decoder.start` without gradients. Only around this call: inside a generator it would turn gradients off for the
    caller too."""
    return decoder.start(prompts)


@torch.inference_mode()
def advance_session(session: Session, rows: Sequence[int], tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Keep these rows (unless they are all), append a token to each, and return the next logits."""
    if list(rows) != list(range(logits.shape[0])):
        session.select(torch.tensor(rows, dtype=torch.int64, device=logits.device))
    return session.advance(torch.tensor(tokens, dtype=torch.int64, device=logits.device))
