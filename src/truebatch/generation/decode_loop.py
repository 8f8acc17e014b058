"""The decoding loop: many prompts, one token each per forward pass; rows leave when their text ends.

prompts -> groups of rows -> start -> choose, give, drop the ended, advance -> pieces as they come
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truebatch.errors import ConfigError
from truebatch.generation.beam_search import search_beams
from truebatch.generation.config import Generation
from truebatch.generation.interface import (
    Decoder,
    Ended,
    Prompt,
    TokenEvent,
    advance_session,
    check_prompts,
    group_prompts,
    start_session,
)
from truebatch.generation.sampling import check_logits, choose_tokens, penalise, seen_tokens
from truebatch.generation.stop_criteria import Endings, Read
from truebatch.generation.token_trie import TokenTrie

ROWS = 32
"""Default number of prompts per forward pass."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The new tokens of a prompt, and the reason it ended."""

    tokens: tuple[int, ...]
    ended: Ended


def generate_tokens(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: Generation,
    *,
    read: Read | None = None,
    rows: int = ROWS,
    choices: TokenTrie | None = None,
) -> Iterator[TokenEvent]:
    """Continue every prompt and yield each token as it comes; the last piece of a prompt gives the reason it ended.

    The result of a prompt depends on its tokens, its key and the settings: not on other prompts, their order or `rows`.
    A beam search gives a prompt's tokens at the end of its search. `read` is needed where there are stop texts.
    `choices` are the only texts that are allowed.
    """
    if choices is not None and settings.beams > 1:
        raise ConfigError("a beam search cannot choose among given texts", seen=f"beams={settings.beams}", do="beams=1")
    if rows < 1:
        raise ConfigError("rows is out of range", seen=f"rows={rows}", do="give 1 or more")
    check_prompts(prompts, decoder.max_length)
    endings = Endings(
        end_ids=decoder.end_ids, max_length=decoder.max_length, settings=settings, read=read, choices=choices
    )
    run = search_beams if settings.beams > 1 else _draw
    # Beams are rows too.
    for numbers in group_prompts(prompts, max(1, rows // settings.beams)):
        yield from run(decoder, [prompts[number] for number in numbers], numbers, endings)


def collect(pieces: Iterator[TokenEvent], num_prompts: int) -> list[Continuation]:
    """Collect all pieces into one continuation per prompt, in order."""
    tokens: list[list[int]] = [[] for _ in range(num_prompts)]
    ended: dict[int, Ended] = {}
    for piece in pieces:
        tokens[piece.prompt] += [] if piece.token is None else [piece.token]
        if piece.ended is not None:
            ended[piece.prompt] = piece.ended
    return [Continuation(tuple(new), ended[number]) for number, new in enumerate(tokens)]


@dataclass(slots=True)
class _Row:
    """An unfinished text."""

    number: int
    prompt: Prompt
    new: list[int] = field(default_factory=list)


def _draw(
    decoder: Decoder, prompts: Sequence[Prompt], numbers: Sequence[int], endings: Endings
) -> Iterator[TokenEvent]:
    rows = [_Row(number, prompt) for number, prompt in zip(numbers, prompts, strict=True)]
    logits, session = start_session(decoder, prompts)
    while True:
        going = []
        for at, token in enumerate(_choose(rows, logits, endings)):
            row = rows[at]
            row.new.append(token)
            ended = endings.after(row.prompt, row.new)
            yield TokenEvent(row.number, None if ended == "end" else token, ended)
            going += [at] if ended is None else []
        rows = [rows[at] for at in going]
        if not rows:
            return
        logits = advance_session(session, going, [row.new[-1] for row in rows], logits)


@torch.inference_mode()
def _choose(rows: Sequence[_Row], logits: Tensor, endings: Endings) -> list[int]:
    settings = endings.settings
    check_logits(logits, [row.number for row in rows])
    if settings.repetition_penalty != 1:
        is_seen = seen_tokens([(*row.prompt.ids, *row.new) for row in rows], logits)
        logits = penalise(logits, is_seen, settings.repetition_penalty)
    if endings.choices is not None:
        logits = endings.choices.mask([row.new for row in rows], logits)
    keys = torch.tensor([row.prompt.key for row in rows], device=logits.device)
    places = torch.tensor([len(row.new) for row in rows], device=logits.device)
    chosen: list[int] = choose_tokens(logits, settings, keys=keys, places=places).tolist()
    return chosen
