"""A decoder with fixed forward shapes: filler rows keep them constant, so that no neighbour changes a bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truebatch.errors import ConfigError, DataError
from truebatch.generation.interface import Decoder, DecoderWrapper, Prompt, Session, start_session
from truebatch.scoring.backends.fixed_shapes import Shapes


@dataclass(frozen=True, slots=True)
class FixedShapeDecoder(DecoderWrapper):
    """Runs prompts of one width in a forward pass of fixed rows and cells; the remaining rows are fillers."""

    decoder: Decoder
    shapes: Shapes
    filler: int
    """The token of filler rows; not an image token."""
    new_tokens: int = 1
    """Positions that must be left after a prompt."""

    def width(self, prompt: Prompt) -> int:
        """The width of this prompt's row; raises `DataError` if there is no room for a filler of that width."""
        width, most = self.shapes.width(len(prompt.ids)), self.decoder.max_length
        width = width if most is None else min(width, most - self.new_tokens)
        if len(prompt.ids) >= width:
            raise DataError(
                "a prompt is too long for level `shape`",
                seen=f"{len(prompt.ids)} tokens, {most} positions, {self.new_tokens} new tokens",
                do="shorten it, or use level `plan`",
            )
        return width

    def groups(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Indices of prompts that may share a forward pass: of one width, and fewer than the rows."""
        by_width: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_width.setdefault(self.width(prompt), []).append(number)
        for width, numbers in by_width.items():
            most = self.shapes.rows(width) - 1
            yield from (numbers[at : at + most] for at in range(0, len(numbers), most))

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Session]:
        """One forward pass in the fixed shape for these prompts' width."""
        (width,) = {self.width(prompt) for prompt in prompts}
        missing = self.shapes.rows(width) - len(prompts)
        if missing < 1:
            raise AssertionError(f"{len(prompts)} prompts leave no row for a filler; see `groups`")
        fillers = [Prompt(ids=(self.filler,) * width, key=0)] * missing
        logits, session = self.decoder.start([*prompts, *fillers])
        return logits[: len(prompts)], _PinnedSession(session, self.filler, len(logits), len(prompts))

    def logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """[N, V] next-token logits of any number of prompts."""
        out: dict[int, Tensor] = {}
        for numbers in self.groups(prompts):
            found, _ = start_session(self, [prompts[number] for number in numbers])
            out.update(zip(numbers, found, strict=True))
        return torch.stack([out[number] for number in range(len(prompts))])


class _PinnedSession:
    """All rows continue, including fillers and finished ones, so that the shape stays the same."""

    def __init__(self, session: Session, filler: int, rows: int, prompts: int) -> None:
        self._session, self._filler, self._all = session, filler, rows
        self._rows = torch.arange(prompts)

    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every row."""
        rows = self._rows.to(tokens.device)
        every = torch.full((self._all,), self._filler, dtype=tokens.dtype, device=tokens.device)
        every[rows] = tokens
        return self._session.advance(every)[rows]

    def select(self, rows: Tensor, /) -> None:
        """Keep these rows; none may occur twice."""
        kept = self._rows[rows.cpu()]
        if len(set(kept.tolist())) != len(kept):
            raise ConfigError(
                "level `shape` cannot duplicate a row",
                seen="a beam search",
                do="use beams=1, or level `plan`",
            )
        self._rows = kept
