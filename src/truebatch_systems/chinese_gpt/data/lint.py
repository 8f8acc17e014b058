"""Look at a corpus before training on it: what is empty, doubled, too long, or not what it seems.

texts -> problems, each with the places it was seen, and the lengths of what is there
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from truebatch_systems.chinese_gpt.data.characters import normalise
from truebatch_systems.chinese_gpt.data.corpus import Text
from truebatch_systems.chinese_gpt.data.dialogues import ASSISTANT, is_dialogue, question_and_answer
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import SPECIAL, Vocab

SHOWN = 3
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
WORDS = {
    "empty": "{number} text(s) empty, to be left out ({places})",
    "duplicate": "{number} text(s) the same as an earlier one; all of them are trained on ({places})",
    "special": "{number} text(s) with a special token such as {word} spelled out; it is read as plain text ({places})",
    "overlong": "{number} text(s) with more tokens than the model reads; by default the end is kept ({places})",
    "short": "{number} text(s) of a single character ({places})",
    "no_answer": "{number} text(s) like a dialogue without an answer after {who} ({places})",
    "control": "{number} text(s) with control characters, such as colours of a terminal; they are learned ({places})",
    "replacement": "{number} text(s) with the character U+FFFD: an earlier conversion has lost something there ({places})",
}
"""Whole sentences, so that they can be said in another language."""
HARMLESS = ("duplicate", "special", "short")


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of problem and where it was seen."""

    kind: str
    places: tuple[str, ...]

    def line(self) -> str:
        """In one line."""
        shown = "; ".join(self.places[:SHOWN]) + ("; ..." if len(self.places) > SHOWN else "")
        return WORDS[self.kind].format(number=f"{len(self.places):,}", places=shown, word=SPECIAL[0], who=ASSISTANT[:2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Lint:
    """What a corpus looks like."""

    num_texts: int
    num_dialogues: int
    characters: tuple[int, ...]
    """Minimum, median, 90th percentile, maximum."""
    tokens: tuple[int, ...]
    """The same in tokens, BOS and EOS counted; empty without a vocabulary."""
    problems: tuple[Problem, ...]

    @property
    def is_clean(self) -> bool:
        """Whether all is well but for what does no harm."""
        return all(problem.kind in HARMLESS for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "texts": self.num_texts,
            "dialogues": self.num_dialogues,
            "characters": list(self.characters),
            "tokens": list(self.tokens),
            "problems": {problem.kind: list(problem.places) for problem in self.problems},
        }


def lint_texts(texts: Sequence[Text], *, vocab: Vocab | None = None, max_seq_len: int = 128) -> Lint:
    """Every problem of a corpus with its places. With a vocabulary, lengths in tokens too."""
    full = [text for text in texts if normalise(text.text)]
    tokens = [len(vocab.encode_sample(text.text)) for text in full] if vocab is not None else []
    found = {
        "empty": [text.place for text in texts if not normalise(text.text)],
        "duplicate": _duplicates(full),
        "special": [text.place for text in full if any(word in text.text for word in SPECIAL)],
        "overlong": [text.place for text, n in zip(full, tokens, strict=False) if n > max_seq_len],
        "short": [text.place for text in full if len(normalise(text.text)) == 1],
        "no_answer": [text.place for text in full if _is_unanswered(text.text)],
        "control": [text.place for text in full if _CONTROL.search(text.text)],
        "replacement": [text.place for text in full if "\ufffd" in text.text],
    }
    return Lint(
        num_texts=len(texts),
        num_dialogues=sum(is_dialogue(text.text) for text in full),
        characters=_quantiles(len(text.text) for text in full),
        tokens=_quantiles(tokens),
        problems=tuple(Problem(kind, tuple(places)) for kind, places in found.items() if places),
    )


def coverage(vocab: Vocab, texts: Sequence[Text]) -> dict[str, float | int]:
    """How a vocabulary fits texts: words, unknown tokens, and words that no text uses."""
    ids = [i for text in texts for i in vocab.encode(text.text)]
    used = set(ids)
    return {
        "words": len(vocab),
        "tokens": len(ids),
        "unknown": sum(i == 1 for i in ids),
        "never_used": len(vocab) - len(SPECIAL) - len(used - set(range(len(SPECIAL)))),
    }


def _duplicates(texts: Iterable[Text]) -> list[str]:
    first: dict[str, str] = {}
    places = []
    for text in texts:
        known = first.setdefault(normalise(text.text), text.place)
        if known != text.place:
            places.append(f"{text.place} repeats {known}")
    return places


def _is_unanswered(text: str) -> bool:
    begins = text.lstrip().startswith(("用户：", "用户:"))
    return begins and (not is_dialogue(text) or not question_and_answer(text)[1])


def _quantiles(numbers: Iterable[int]) -> tuple[int, ...]:
    values = list(numbers)
    return tuple(int(n) for n in np.percentile(values, [0, 50, 90, 100])) if values else ()
