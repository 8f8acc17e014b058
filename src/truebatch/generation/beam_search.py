"""Beam search over many prompts at once: the likeliest text by its log-probability over its length.

start -> every beam continued by every token -> the best of each prompt are kept -> best text of each prompt
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truebatch.generation.interface import Decoder, Ended, Prompt, TokenEvent, advance_session, start_session
from truebatch.generation.sampling import check_logits, find_candidates, penalise, seen_tokens
from truebatch.generation.stop_criteria import Endings


@dataclass(frozen=True, slots=True)
class Beam:
    """A candidate text."""

    new: tuple[int, ...]
    log_prob: float
    """Of all new tokens, the one that ends the text among them."""
    row: int
    """Its row in the forward pass that gave its last token."""
    ended: Ended | None = None

    def score(self, power: float) -> float:
        """What beams are ranked by: the log-probability over the number of new tokens to this power."""
        return self.log_prob / float(len(self.new) ** power)


@dataclass(frozen=True, slots=True)
class _Search:
    """The beams of one prompt, best first."""

    number: int
    prompt: Prompt
    beams: tuple[Beam, ...]


def search_beams(
    decoder: Decoder, prompts: Sequence[Prompt], numbers: Sequence[int], endings: Endings
) -> Iterator[TokenEvent]:
    """Yield the tokens of each prompt's best text once its search is over; beams of different prompts never interact.

    A search is over when no active beam can become better than the best finished one.
    """
    logits, session = start_session(decoder, prompts)
    named = enumerate(zip(numbers, prompts, strict=True))
    searches = [_Search(number, prompt, (Beam((), 0.0, row),)) for row, (number, prompt) in named]
    while searches:
        searches = _extend(searches, logits, endings)
        for search in searches:
            if _is_over(search, endings):
                yield from _pieces(search)
        searches = [search for search in searches if not _is_over(search, endings)]
        going = [beam for search in searches for beam in _going(search)]
        if going:
            logits = advance_session(session, [b.row for b in going], [b.new[-1] for b in going], logits)
            searches = _number_rows(searches)


def _going(search: _Search) -> list[Beam]:
    return [beam for beam in search.beams if beam.ended is None]


def _number_rows(searches: Sequence[_Search]) -> list[_Search]:
    """Reorder rows to those of the active beams."""
    row = 0
    out = []
    for search in searches:
        beams = []
        for beam in search.beams:
            beams.append(replace(beam, row=row) if beam.ended is None else beam)
            row += beam.ended is None
        out.append(replace(search, beams=tuple(beams)))
    return out


@torch.inference_mode()
def _extend(searches: Sequence[_Search], logits: Tensor, endings: Endings) -> list[_Search]:
    """Extend every active beam by every token; keep the best, including finished ones."""
    settings = endings.settings
    going = [(search, beam) for search in searches for beam in _going(search)]
    check_logits(logits, [search.number for search, _ in going])
    if settings.repetition_penalty != 1:
        is_seen = seen_tokens([(*search.prompt.ids, *beam.new) for search, beam in going], logits)
        logits = penalise(logits, is_seen, settings.repetition_penalty)
    found = find_candidates(logits, settings)
    width = min(settings.beams, found.ids.shape[1])
    best, at = found.log_probs.topk(width, dim=-1)  # a prompt keeps no more than this of one beam
    ids, values = found.ids.gather(1, at).tolist(), best.tolist()
    return [_best(search, ids, values, endings) for search in searches]


def _best(search: _Search, ids: list[list[int]], values: list[list[float]], endings: Endings) -> _Search:
    pool = [beam for beam in search.beams if beam.ended is not None]
    for beam in _going(search):
        for token, value in zip(ids[beam.row], values[beam.row], strict=True):
            if value > -torch.inf:
                pool.append(Beam((*beam.new, token), beam.log_prob + value, beam.row))
    power = endings.settings.length_penalty
    kept = sorted(pool, key=lambda beam: (-beam.score(power), beam.new))[: endings.settings.beams]
    ended = [b if b.ended else replace(b, ended=endings.after(search.prompt, b.new)) for b in kept]
    return replace(search, beams=tuple(ended))


def _is_over(search: _Search, endings: Endings) -> bool:
    best, going = search.beams[0], _going(search)
    if best.ended is None or not going:
        return not going
    # A log-probability only falls: at best a beam keeps its value and gets the most favourable length.
    power = endings.settings.length_penalty
    lengths = (len(going[0].new) + 1, endings.room(search.prompt)[0])
    hope = max(beam.log_prob for beam in going) / max(float(length**power) for length in lengths)
    return best.score(power) >= hope


def _pieces(search: _Search) -> Iterator[TokenEvent]:
    best = search.beams[0]
    tokens = best.new[:-1] if best.ended == "end" else best.new
    for token in tokens[:-1]:
        yield TokenEvent(search.number, token)
    yield TokenEvent(search.number, tokens[-1] if tokens else None, best.ended)
