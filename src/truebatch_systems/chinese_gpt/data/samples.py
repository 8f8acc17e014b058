"""Texts as samples: ids to read, and the next id to learn beside each.

text -> parts -> BOS, ids, EOS -> at most max_seq_len -> input_ids: all but the last; labels: all but the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truebatch.batch.chunked_cross_entropy import IGNORE
from truebatch.batch.fields import Field
from truebatch.errors import DataError
from truebatch.planning.rows import Ints
from truebatch_systems.chinese_gpt.config import OverlongText
from truebatch_systems.chinese_gpt.data.characters import normalise
from truebatch_systems.chinese_gpt.data.corpus import Text
from truebatch_systems.chinese_gpt.data.dialogues import parts_of
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import BOS, EOS, PAD, UNK, Vocab

FIELDS = (
    Field(name="input_ids", pad=PAD, dtype="int64"),
    Field(name="labels", pad=IGNORE, blank=IGNORE, dtype="int64"),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedTexts:
    """The samples of one part of a corpus, addressed by sample id."""

    texts: tuple[Text, ...]
    input_ids: tuple[Ints, ...]
    labels: tuple[Ints, ...]
    num_empty: int
    """Texts without a single token: there is nothing to learn in them."""
    num_cut: int
    num_dropped: int
    num_split: int
    """Texts that became several samples."""
    num_unknown: int
    """Tokens that are not in the vocabulary."""

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        text = self.texts[sample_id]
        return {"input_ids": self.input_ids[sample_id], "labels": self.labels[sample_id], "id": text.place}

    @property
    def lengths(self) -> Ints:
        """[N] cells of every sample: its tokens with BOS, without EOS, which is only learned."""
        return np.array([len(ids) for ids in self.input_ids], dtype=np.int64)

    @property
    def num_labels(self) -> Ints:
        """[N] tokens of every sample that are learned."""
        return np.array([int((labels != IGNORE).sum()) for labels in self.labels], dtype=np.int64)


def encode_texts(
    texts: Sequence[Text], vocab: Vocab, *, max_seq_len: int, overlong: OverlongText = "cut", mask_prompt: bool = True
) -> EncodedTexts:
    """Every text as a sample; what is empty, cut, split or left out is counted, never only gone."""
    kept: list[tuple[Text, Ints, Ints]] = []
    counted = dict.fromkeys(("empty", "cut", "drop", "split"), 0)
    for text in texts:
        if not normalise(text.text):
            counted["empty"] += 1
            continue
        ids, is_learned = _tokens(text.text, vocab, mask_prompt=mask_prompt)
        labels = np.where(is_learned, ids, IGNORE)
        if len(ids) <= max_seq_len:
            kept.append((text, ids[:-1], labels[1:]))
            continue
        if overlong == "refuse":
            raise _too_long(text, len(ids), max_seq_len)
        counted[overlong] += 1
        if overlong == "cut":
            kept.append((text, _keep_end(ids, max_seq_len)[:-1], _keep_end(labels, max_seq_len)[1:]))
        elif overlong == "split":
            parts = split_ids(ids, labels, max_seq_len, vocab.sentence_ends)
            kept += [(replace(text, part=number), *part) for number, part in enumerate(parts, start=1)]
    return EncodedTexts(
        texts=tuple(text for text, _, _ in kept),
        input_ids=tuple(ids for _, ids, _ in kept),
        labels=tuple(labels for _, _, labels in kept),
        num_empty=counted["empty"],
        num_cut=counted["cut"],
        num_dropped=counted["drop"],
        num_split=counted["split"],
        num_unknown=sum(int((ids == UNK).sum()) for _, ids, _ in kept),
    )


def split_ids(ids: Ints, labels: Ints, most: int, ends: frozenset[int]) -> list[tuple[Ints, Ints]]:
    """Inputs and labels of the parts of a long text: every token to learn is learned once, in one of them.

    A part ends behind the end of a sentence where its second half has one. Later parts begin with BOS and the last token
    of the part before, which is read there and not learned again; parts with nothing to learn are left out.
    """
    parts, begin = [], 0
    while begin < len(ids) - 1:
        lead = [] if begin == 0 else [ids[0]]
        room = most - 1 - len(lead)
        stop = min(begin + room, len(ids) - 1)
        if stop < len(ids) - 1:
            places = [at for at in range(begin + room // 2, stop) if int(ids[at]) in ends]
            stop = places[-1] if places else stop
        inputs = np.concatenate([np.array(lead, dtype=np.int64), ids[begin:stop]])
        targets = np.concatenate([np.full(len(lead), IGNORE, dtype=np.int64), labels[begin + 1 : stop + 1]])
        if (targets != IGNORE).any():
            parts.append((inputs, targets))
        begin = stop
    return parts


def _tokens(text: str, vocab: Vocab, *, mask_prompt: bool) -> tuple[Ints, Ints]:
    """BOS, the parts, EOS, and 1 where a token is learned. EOS ends what is learned, so it is learned too."""
    ids, learned = [BOS], [0]
    for part in parts_of(text, mask_prompt=mask_prompt):
        own = vocab.encode(part.text)
        ids += own
        learned += [int(part.is_learned)] * len(own)
    return np.array([*ids, EOS], dtype=np.int64), np.array([*learned, 1], dtype=np.int64)


def _keep_end(values: Ints, most: int) -> Ints:
    """The first, and as many of the last as fit: an answer stands at the end."""
    return np.concatenate([values[:1], values[len(values) - most + 1 :]])


def _too_long(text: Text, length: int, most: int) -> DataError:
    return DataError(
        f"{text.place} is longer than the model reads",
        seen=f"{length} tokens, max_seq_len={most}: {text.text[:30]!r}...",
        do="shorten it, raise max_seq_len, or set overlong=cut (keeps the end), split or drop; all are counted",
    )
