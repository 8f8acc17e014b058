"""Text into words that join to the text again: the built-in way, jieba, or byte pairs.

A segmenter is data: `describe()` is JSON, and `segmenter_from` makes the same one from it on another machine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import read_text
from truebatch_systems.chinese_gpt.data.characters import is_han, normalise, pieces_of
from truebatch_systems.chinese_gpt.tokenizer.dictionary import learn_words

_MOST_BYTES = 1 << 26

Backend = Literal["builtin", "character", "jieba", "bpe"]
BPE_WORDS = 4000


class Segmenter(Protocol):
    """What cuts text into words."""

    @property
    def backend(self) -> Backend:
        """Its name."""
        ...

    def cut(self, text: str) -> list[str]:
        """The words of a text."""
        ...

    def join(self, words: Sequence[str]) -> str:
        """The text of words: the way back."""
        ...

    def describe(self) -> dict[str, Any]:
        """All that is needed to make it again, as JSON."""
        ...


@dataclass(frozen=True)
class BuiltinSegmenter:
    """The likeliest words of each run of Han characters, from the words of a dictionary and their counts."""

    words: Mapping[str, int]
    """Words of two characters and more."""
    total: int = 0
    """What counts are divided by; 0: their sum. It stays when words are left out, or paths would change."""
    backend: Backend = field(default="builtin", init=False)

    def __post_init__(self) -> None:
        if not self.total:
            object.__setattr__(self, "total", sum(self.words.values()) + 1)

    def only(self, used: Collection[str]) -> BuiltinSegmenter:
        """The same paths with fewer words, as long as every word of every path is among them."""
        return BuiltinSegmenter({word: n for word, n in self.words.items() if word in used}, self.total)

    def cut(self, text: str) -> list[str]:
        """Every run of Han characters along its likeliest path; characters outside the dictionary stand alone."""
        return [
            word for piece in pieces_of(normalise(text)) for word in (self._path(piece) if is_han(piece) else [piece])
        ]

    def join(self, words: Sequence[str]) -> str:
        """Words end to end: blanks are words of their own."""
        return "".join(words)

    def describe(self) -> dict[str, Any]:
        """The dictionary."""
        return {"backend": self.backend, "words": dict(sorted(self.words.items())), "total": self.total}

    def score(self, word: str) -> float:
        """The log-probability of a word: the path through a text has the highest sum of these."""
        return self._scores.get(word, self._alone)

    @cached_property
    def _scores(self) -> dict[str, float]:
        return {word: math.log(n / self.total) for word, n in self.words.items()}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.words), default=1)

    @cached_property
    def _alone(self) -> float:
        return -math.log(self.total)

    def _path(self, run: str) -> list[str]:
        """Left to right: the best score up to each place, and how long the word before it is.

        Of equal paths the one with the longer last word stays, as in the Unigram model of `tokenizers`: an exported
        tokenizer cuts every text alike.
        """
        scores, alone = self._scores, self._alone
        best, step = [0.0] * (len(run) + 1), [1] * (len(run) + 1)
        for end in range(1, len(run) + 1):
            best[end] = -math.inf
            for n in range(min(self._longest, end), 0, -1):
                score = alone if n == 1 else scores.get(run[end - n : end])
                if score is not None and score + best[end - n] > best[end]:
                    best[end], step[end] = score + best[end - n], n
        words, at = [], len(run)
        while at:
            words.append(run[at - step[at] : at])
            at -= step[at]
        return words[::-1]


@dataclass(frozen=True)
class JiebaSegmenter:
    """The words of jieba's dictionary, without its guesses at unknown words."""

    dictionary: str
    """A hash of jieba's dictionary file: another one would cut otherwise."""
    backend: Backend = field(default="jieba", init=False)

    def cut(self, text: str) -> list[str]:
        """Runs of Han characters go through jieba, the rest as in the built-in way."""
        return [
            word for piece in pieces_of(normalise(text)) for word in (self._cut(piece) if is_han(piece) else [piece])
        ]

    def join(self, words: Sequence[str]) -> str:
        """Words end to end: blanks are words of their own."""
        return "".join(words)

    def describe(self) -> dict[str, Any]:
        """Which dictionary."""
        return {"backend": self.backend, "dictionary": self.dictionary}

    @cached_property
    def _jieba_cut(self) -> Callable[[str], list[str]]:
        tokenizer = _import_jieba().Tokenizer()
        return lambda run: list(tokenizer.cut(run, HMM=False))

    def _cut(self, run: str) -> list[str]:
        return self._jieba_cut(run)


@dataclass(frozen=True)
class BpeSegmenter:
    """Byte pairs, merged as often as the corpus asks for: no text is ever unknown."""

    definition: str
    """The JSON of the package `tokenizers`."""
    backend: Backend = field(default="bpe", init=False)

    def cut(self, text: str) -> list[str]:
        """The byte pairs of a text, written in the letters `tokenizers` has for bytes."""
        tokens: list[str] = self._tokenizer.encode(normalise(text)).tokens
        return tokens

    def join(self, words: Sequence[str]) -> str:
        """The text of byte pairs; half characters become the replacement character."""
        text: str = self._tokenizer.decoder.decode(list(words))
        return text

    def describe(self) -> dict[str, Any]:
        """The whole tokenizer."""
        return {"backend": self.backend, "definition": self.definition}

    @cached_property
    def _tokenizer(self) -> Any:
        return _import_tokenizers().Tokenizer.from_str(self.definition)


def learn_segmenter(texts: Sequence[str], backend: Backend = "builtin", *, dictionary: Path | None = None) -> Segmenter:
    """The segmenter for a corpus. `dictionary` is a file for the built-in way: a word, optionally with a count, a line."""
    if dictionary is not None and backend != "builtin":
        raise ConfigError(
            "only the built-in segmenter reads a dictionary file",
            seen=f"backend={backend!r}, dictionary={str(dictionary)!r}",
            do="set backend=builtin, or leave the dictionary out",
        )
    if backend == "jieba":
        return JiebaSegmenter(_jieba_hash())
    if backend == "bpe":
        return BpeSegmenter(_train_bpe(texts))
    if backend == "character":
        return BuiltinSegmenter({})  # without words every character stands alone
    if dictionary is not None:
        return BuiltinSegmenter(read_dictionary(dictionary))
    runs = [piece for text in texts for piece in pieces_of(normalise(text)) if is_han(piece)]
    return BuiltinSegmenter(learn_words(runs))


def segmenter_from(description: Mapping[str, Any]) -> Segmenter:
    """The segmenter that gave this description. jieba must have the same dictionary it had then."""
    backend = description["backend"]
    if backend == "builtin":
        return BuiltinSegmenter(dict(description["words"]), int(description["total"]))
    if backend == "bpe":
        return BpeSegmenter(str(description["definition"]))
    now, then = _jieba_hash(), str(description["dictionary"])
    if now != then:
        raise ConfigError(
            "jieba has another dictionary than the one this vocabulary was made with",
            seen=f"hash {now} now, {then} then",
            do="install the jieba the model was trained with, or train again",
        )
    return JiebaSegmenter(then)


def read_dictionary(file: Path) -> dict[str, int]:
    """Words and counts of a dictionary file, as jieba's are written: `word [count [tag]]`; without a count, 1."""
    words: dict[str, int] = {}
    for number, line in enumerate(read_text(file, max_bytes=_MOST_BYTES).splitlines(), start=1):
        parts = line.split()
        if len(parts) > 1 and not parts[1].isdigit():
            raise ConfigError(
                f"{file}:{number} is no line of a dictionary", seen=repr(line[:40]), do="write `word` or `word count`"
            )
        if parts and len(parts[0]) > 1 and is_han(parts[0]):
            words[parts[0]] = int(parts[1]) if len(parts) > 1 else 1
    return words


def _import_jieba() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its own: an old way to find its files, and escapes in its patterns.
        try:
            jieba = importlib.import_module("jieba")
        except ImportError as error:
            raise ConfigError(
                "the backend jieba needs the package of that name",
                seen=str(error),
                do="pip install jieba, or use backend=builtin, which needs nothing",
            ) from error
    jieba.setLogLevel("WARNING")
    return jieba


def _jieba_hash() -> str:
    with _import_jieba().Tokenizer().get_dict_file() as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _import_tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            "the backend bpe needs the package tokenizers",
            seen=str(error),
            do="pip install tokenizers, or use backend=builtin, which needs nothing",
        ) from error


def _train_bpe(texts: Sequence[str]) -> str:
    t = _import_tokenizers()
    tokenizer = t.Tokenizer(t.models.BPE())
    tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = t.decoders.ByteLevel()
    alphabet = t.pre_tokenizers.ByteLevel.alphabet()
    trainer = t.trainers.BpeTrainer(vocab_size=BPE_WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([normalise(text) for text in texts], trainer)
    return json.dumps(json.loads(tokenizer.to_str()), sort_keys=True, ensure_ascii=False)


def bpe_words(segmenter: BpeSegmenter) -> list[str]:
    """All byte pairs there are, most of them seen in the corpus: what makes no text unknown."""
    known: dict[str, int] = segmenter._tokenizer.get_vocab()
    return sorted(known)
