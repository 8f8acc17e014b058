"""Decode pieces to text as they come; emitted text is never changed later.

pieces -> tokens of each prompt -> text so far -> the part that is certain -> (prompt, new text)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from truebatch.generation.interface import TokenEvent
from truebatch.generation.stop_criteria import Read, find_stop

HALF = "\ufffd"
"""What a tokenizer gives for a character of which only some bytes have come."""


def stream_texts(pieces: Iterable[TokenEvent], read: Read, stops: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """(number of the prompt, new text) as it appears; joined, it is the text of all tokens up to the first stop text.

    Held back until certain: incomplete characters, and what may be the beginning of a stop text.
    """
    tokens: dict[int, list[int]] = {}
    given: dict[int, str] = {}
    for piece in pieces:
        new = tokens.setdefault(piece.prompt, [])
        new += [] if piece.token is None else [piece.token]
        text = read(new)
        text = text[: find_stop(text, stops)]
        certain = text if piece.ended is not None else text[: _certain(text, stops)]
        before = given.get(piece.prompt, "")
        if len(certain) > len(before):
            given[piece.prompt] = certain
            yield piece.prompt, certain[len(before) :]


def join_texts(parts: Iterable[tuple[int, str]], num_prompts: int) -> list[str]:
    """The whole text of every prompt."""
    texts = [""] * num_prompts
    for number, text in parts:
        texts[number] += text
    return texts


def _certain(text: str, stops: Sequence[str]) -> int:
    """How much of a text is final whatever comes next."""
    whole = text.rstrip(HALF)
    begun = [n for stop in stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
    return len(whole) - max(begun, default=0)
