"""The vocabulary: words of the training texts as ids, and the way back to readable Chinese.

text -> words (segmenter) -> ids; special words have the ids 0 to 6 and never come from a text
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.atomic_files import write_text
from truebatch.io.text_encoding import read_text
from truebatch_systems.chinese_gpt.tokenizer.segmenter import (
    Backend,
    BpeSegmenter,
    BuiltinSegmenter,
    Segmenter,
    bpe_words,
    learn_segmenter,
    segmenter_from,
)

SPECIAL = ("<|pad|>", "<|unk|>", "<|bos|>", "</s>", "<|sep|>", "<|cls|>", "<|mask|>")
PAD, UNK, BOS, EOS, SEP, CLS, MASK = range(len(SPECIAL))
MAX_BYTES = 64 * 2**20
FORMAT = 1
SENTENCE_ENDS = ("。", "！", "？", "!", "?", "\n")


@dataclass(frozen=True, eq=False)
class Vocab:
    """Words and their ids. `words[id]` is a word; the special ones come first, the others in sorted order."""

    words: tuple[str, ...]
    segmenter: Segmenter

    @classmethod
    def build_from_texts(
        cls, texts: Iterable[str], *, backend: Backend = "builtin", dictionary: Path | None = None
    ) -> Vocab:
        """Every word of the texts, once: nothing in them is unknown, and (byte pairs apart) no word is never used.

        The same texts give the same vocabulary in any order, on any machine.
        """
        known = list(texts)
        segmenter = learn_segmenter(known, backend, dictionary=dictionary)
        if isinstance(segmenter, BpeSegmenter):
            return cls((*SPECIAL, *bpe_words(segmenter)), segmenter)
        used = {word for text in known for word in segmenter.cut(text)}
        if isinstance(segmenter, BuiltinSegmenter):
            segmenter = segmenter.only(used)
        return cls((*SPECIAL, *sorted(used)), segmenter)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def backend(self) -> Backend:
        """What cuts text into words."""
        return self.segmenter.backend

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Word -> id, special ones left out: a text that spells one is only a text."""
        return {word: i for i, word in enumerate(self.words) if i >= len(SPECIAL)}

    @cached_property
    def hash(self) -> str:
        """Changes when any word, id or the segmentation does."""
        return hashlib.sha256(_dump(self.as_dict()).encode()).hexdigest()[:16]

    @cached_property
    def sentence_ends(self) -> frozenset[int]:
        """The ids behind which a long text is best split."""
        return frozenset(i for word, i in self.ids.items() if word in SENTENCE_ENDS)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones. An unknown word becomes its characters where those are known."""
        ids: list[int] = []
        for word in self.segmenter.cut(text):
            known = self.ids.get(word)
            ids += [known] if known is not None else self._by_character(word)
        return ids

    def _by_character(self, word: str) -> list[int]:
        return [self.ids.get(character, UNK) for character in word]

    def encode_sample(self, text: str) -> list[int]:
        """BOS, the text, EOS: what is trained on. Nothing is cut here."""
        return [BOS, *self.encode(text), EOS]

    def encode_prompt(self, text: str) -> list[int]:
        """BOS and the text: what generation begins with, as every sample of the training does."""
        return [BOS, *self.encode(text)]

    def decode(self, ids: Iterable[int], *, with_special: bool = False) -> str:
        """Readable text. Special ids are left out unless asked for; unknown words always show."""
        parts: list[str] = []
        run: list[str] = []
        for i in ids:
            if i >= len(SPECIAL):
                run.append(self.words[i])
                continue
            parts.append(self.segmenter.join(run))
            run = []
            parts += [SPECIAL[i]] if with_special or i == UNK else []
        return "".join([*parts, self.segmenter.join(run)])

    def as_dict(self) -> dict[str, Any]:
        """The vocabulary as JSON, its segmenter with it."""
        words = list(self.words[len(SPECIAL) :])
        return {"format": FORMAT, "special": list(SPECIAL), "words": words, "segmenter": self.segmenter.describe()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Vocab:
        """The vocabulary that `as_dict` gave."""
        return cls((*SPECIAL, *saved["words"]), segmenter_from(saved["segmenter"]))

    def save(self, file: str | Path) -> None:
        """Write it as JSON."""
        write_text(Path(file), _dump({**self.as_dict(), "hash": self.hash}))

    @classmethod
    def load(cls, file: str | Path) -> Vocab:
        """Read what `save` wrote; a damaged file is refused."""
        file = Path(file)
        try:
            saved = json.loads(read_text(file, max_bytes=MAX_BYTES))
            vocab = cls.from_dict(saved)
            is_whole = saved["hash"] == vocab.hash
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(file, f"{type(error).__name__}: {error}") from error
        if not is_whole:
            raise _damaged(file, f"hash {vocab.hash}, the file says {saved['hash']}")
        return vocab


def count_unknown(ids: Sequence[int]) -> int:
    """How many tokens are unknown."""
    return sum(i == UNK for i in ids)


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _damaged(file: Path, seen: str) -> DataError:
    return DataError(f"{file} is no whole vocabulary", seen=seen, do="write it again with Vocab.save")
