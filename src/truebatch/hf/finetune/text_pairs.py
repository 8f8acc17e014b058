"""Pairs of texts from a data file, whatever schema it is written in: token ids of all texts of a pair, end to end.

anchor + positive (+ negatives) | query + pos + neg | sentence1 + sentence2 (+ score) -> TextPair -> TokenStore, cached
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from truebatch.errors import DataError
from truebatch.hf.embedding.texts import LENGTHS
from truebatch.hf.finetune.token_store import ONCE, Column, TokenStore, load_encoded, make_columns, save_encoded
from truebatch.hf.finetune.tokenize import FileTokenizer
from truebatch.io.data_files import read_samples
from truebatch.io.text_encoding import nearest
from truebatch.planning.lengths.measure import content_hash
from truebatch.progress import counted

WAY = "1"
"""Raised whenever the same file would be encoded differently."""
SCORE = "score"
FIRST = ("anchor", "query", "question", "sentence1")
SECOND = {
    "anchor": ("positive",),
    "query": ("positive", "pos", "answer"),
    "question": ("positive", "answer"),
    "sentence1": ("sentence2",),
}
NEGATIVES = ("negatives", "negative", "neg")
NEEDED = (
    "anchor + positive (+ negative, negatives or negative_1, negative_2, ...) | query + pos + neg | question + answer | "
    "sentence1 + sentence2 (+ score)"
)
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TextPair:
    """An anchor, its positive and its negatives, in this order; or two texts and how alike they are."""

    texts: tuple[str, ...]
    score: float | None = None


def read_pairs(sample: Any, place: str) -> list[TextPair]:
    """One line of data: a pair for each of its positives."""
    if not isinstance(sample, Mapping):
        raise DataError(f"{place} is not a JSON object", seen=f"a {type(sample).__name__}", do=f"a line holds {NEEDED}")
    first = next((name for name in FIRST if name in sample), None)
    second = next((name for name in SECOND.get(first or "", ()) if name in sample), None)
    if first is None or second is None:
        known = SECOND.get(first, ()) if first else FIRST
        close = next((hint for key in sample if key not in known and (hint := nearest(str(key), list(known)))), "")
        keys = ", ".join(map(str, sample)) or "none"
        raise DataError(
            f"{place} holds no pair of texts{close}", seen=f"keys: {keys}", do=f"for embedding a line holds {NEEDED}"
        )
    anchor = _texts(sample[first], first, place)
    positives = _texts(sample[second], second, place)
    numbered = sorted((k for k in sample if str(k).startswith("negative_")), key=lambda k: (len(str(k)), str(k)))
    given = [name for name in (*NEGATIVES, *numbered) if sample.get(name) is not None]
    negatives = [text for name in given for text in _texts(sample[name], name, place)]
    score = _score(sample, place)
    if len(anchor) != 1 or not positives or (score is not None and (negatives or len(positives) > 1)):
        raise DataError(
            f"{place} is not one pair of texts",
            seen=f"{len(anchor)} under {first!r}, {len(positives)} under {second!r}, {len(negatives)} negatives"
            + ("" if score is None else f", score={score}"),
            do="give one anchor and at least one positive; a score goes with two texts and no negatives",
        )
    return [TextPair((*anchor, positive, *negatives), score) for positive in positives]


def _texts(value: Any, name: str, place: str) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple | np.ndarray) or not all(isinstance(text, str) for text in found):
        raise DataError(
            f"{place} needs a text, or a list of them, under {name!r}",
            seen=f"{name}={value!r}"[:120],
            do="correct that line, or remove it",
        )
    return list(found)


def _score(sample: Mapping[str, Any], place: str) -> float | None:
    name = next((name for name in (SCORE, "label", "similarity_score") if sample.get(name) is not None), None)
    if name is None:
        return None
    try:
        return float(sample[name])
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place} needs a number under {name!r}",
            seen=f"{name}={sample[name]!r}"[:120],
            do="give a cosine, from -1 to 1",
        ) from error


def encode_pairs(encoder: FileTokenizer, path: Path) -> TokenStore:
    """Every pair of a file, encoded; taken from the cache if the same content was encoded the same way before."""
    parts = [WAY, content_hash(path), "embedding", encoder.fingerprint, str(encoder.max_length), encoder.overlong]
    key = "tokens-" + hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    file = encoder.cache / f"{key}.npz" if encoder.cache is not None else None
    found = load_encoded(file) if file is not None else None
    if found is None:
        found = _encode(encoder, path)
        if file is not None:
            save_encoded(found, file)
    return replace(found, notes=(f"{path}: {found.notes[0]}", *found.notes[1:]))


def _encode(encoder: FileTokenizer, path: Path) -> TokenStore:
    placed = [
        (place, pair)
        for place, sample in counted(read_samples(path), f"tokenising {path}")
        for pair in read_pairs(sample, place)
    ]
    if not placed:
        raise DataError(f"{path} holds no samples", seen="nothing to train on", do="check that it is the right file")
    _refuse_half_scored(placed, path)
    kept, long = [], list[tuple[int, str]]()
    for (place, pair), ids in zip(placed, _token_lists(encoder, [pair for _, pair in placed]), strict=True):
        longest, most = max(map(len, ids)), encoder.max_length
        if most is not None and longest > most:
            long.append((longest, place))
            if encoder.overlong == "drop":
                continue
            ids = [_cut(encoder, text) if len(one) > most else one for text, one in zip(pair.texts, ids, strict=True)]
        kept.append((pair, ids))
    fitted = _fitted(encoder, long, len(placed), len(kept), path)
    columns = make_columns(
        [{"input_ids": [i for one in ids for i in one], LENGTHS: [len(one) for one in ids]} for _, ids in kept]
    )
    if kept[0][0].score is not None:
        scores = np.array([pair.score for pair, _ in kept], dtype=np.float64)
        columns[f"{ONCE}{SCORE}"] = Column(cast("Any", scores), np.arange(len(kept) + 1, dtype=np.int64))
    return TokenStore(columns, (), (*_described(kept, columns), *_empty(placed), *fitted))


def _refuse_half_scored(placed: Sequence[tuple[str, TextPair]], path: Path) -> None:
    is_scored = placed[0][1].score is not None
    other = next((place for place, pair in placed if (pair.score is not None) != is_scored), None)
    if other is not None:
        raise DataError(
            f"{path} has scores for some pairs only",
            seen=f"a score at {placed[0][0] if is_scored else other}, none at {other if is_scored else placed[0][0]}",
            do="split the file: pairs with a score have another loss than pairs without",
        )


def _token_lists(encoder: FileTokenizer, pairs: Sequence[TextPair]) -> Iterator[list[list[int]]]:
    """The tokens of every text of every pair; many texts at a time, which is what tokenizers are fast at."""
    for first in range(0, len(pairs), _CHUNK):
        chunk = pairs[first : first + _CHUNK]
        found = iter(encoder.tokenizer([text for pair in chunk for text in pair.texts])["input_ids"])
        yield from ([list(next(found)) for _ in pair.texts] for pair in chunk)


def _cut(encoder: FileTokenizer, text: str) -> list[int]:
    """By the tokenizer, which keeps the token that ends a text."""
    return list(encoder.tokenizer(text, truncation=True, max_length=encoder.max_length)["input_ids"])


def _fitted(encoder: FileTokenizer, long: Sequence[tuple[int, str]], all_: int, kept: int, path: Path) -> list[str]:
    if not long:
        return []
    words = f"{len(long):,} of {all_:,} pairs have a text of more than {encoder.max_length:,} tokens"
    if encoder.overlong == "refuse":
        longest, place = max(long)
        raise DataError(
            f"{path}: {words}",
            seen=f"{place} has one of {longest:,} tokens",
            do="--set overlong=drop leaves them out, --set overlong=cut keeps their beginnings; both are counted",
        )
    if not kept:
        raise DataError(f"{path}: no pair is left", seen=f"{words}: dropped", do="raise max_length")
    return [f"{words}: {'cut' if encoder.overlong == 'cut' else 'dropped'}"]


def _described(kept: Sequence[tuple[TextPair, list[list[int]]]], columns: Mapping[str, Column]) -> list[str]:
    tokens, texts = len(columns["input_ids"].values), len(columns[LENGTHS].values)
    if kept[0][0].score is not None:
        return [f"{len(kept):,} pairs with a score, {tokens:,} tokens"]
    return [f"{len(kept):,} pairs, {texts - 2 * len(kept):,} negatives of their own, {tokens:,} tokens"]


def _empty(placed: Sequence[tuple[str, TextPair]]) -> list[str]:
    empty = [place for place, pair in placed if not all(text.strip() for text in pair.texts)]
    if not empty:
        return []
    return [
        f"warning: {len(empty):,} of {len(placed):,} pairs have an empty text, and are trained on all the same; the first is "
        f"{empty[0]}: remove such lines if they are not meant"
    ]
