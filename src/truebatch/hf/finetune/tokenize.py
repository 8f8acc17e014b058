"""A data file through the user's tokenizer: ids and labels of every sample, over-long ones as the user asked.

records -> label names -> token ids and labels -> refused, dropped or cut -> Encoded, cached
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.hf.finetune.chat_template import encode_chat
from truebatch.hf.finetune.label_map import describe_labels, label_names, number_of
from truebatch.hf.finetune.record_formats import (
    ANSWERING,
    Chat,
    Labelled,
    Plain,
    PromptCompletion,
    Record,
    Tagged,
    read_record,
)
from truebatch.hf.finetune.token_store import ONCE, TokenStore, load_encoded, make_columns, save_encoded
from truebatch.hf.heads.losses import IGNORE
from truebatch.io.data_files import read_samples
from truebatch.planning.config import Overlong
from truebatch.planning.lengths.measure import content_hash
from truebatch.progress import counted

WAY = "4"
"""Raised whenever the same file would be encoded differently."""
Sample = dict[str, Sequence[int]]
Placed = tuple[str, Record]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileTokenizer:
    """How the lines of a file become samples."""

    task: str
    tokenizer: Any
    fingerprint: str
    """Of the tokenizer and its chat template."""
    known_labels: Mapping[int, str]
    """Names the model has for its classes."""
    max_length: int | None
    overlong: Overlong
    cache: Path | None


def encode_file(encoder: FileTokenizer, path: Path, *, names: Sequence[str] | None = None) -> TokenStore:
    """Every sample of a file, encoded; taken from the cache if the same content was encoded the same way before.

    `names` are the classes the training data has; without them they are found in this file.
    """
    file = encoder.cache / f"{_key(encoder, path, names)}.npz" if encoder.cache is not None else None
    encoded = load_encoded(file) if file is not None else None
    if encoded is None:
        encoded = _encode(encoder, path, names)
        if file is not None:
            save_encoded(encoded, file)
    # The same content may have had another name when it was encoded.
    return replace(encoded, notes=(f"{path}: {encoded.notes[0]}", *encoded.notes[1:]))


def _key(encoder: FileTokenizer, path: Path, names: Sequence[str] | None) -> str:
    parts = [
        WAY, content_hash(path), encoder.task, encoder.fingerprint, str(encoder.max_length), encoder.overlong,
        repr(sorted(encoder.known_labels.items())), repr(None if names is None else list(names)),
    ]  # fmt: skip
    return "tokens-" + hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _encode(encoder: FileTokenizer, path: Path, names: Sequence[str] | None) -> TokenStore:
    records = [
        (place, read_record(encoder.task, sample, place))
        for place, sample in counted(read_samples(path), f"reading {path}")
    ]
    if not records:
        raise DataError(f"{path} holds no samples", seen="nothing to train on", do="check that it is the right file")
    _refuse_mixture(records, path)
    if names is None:
        names = label_names(found, encoder.known_labels, name=str(path)) if (found := _labels(records)) else ()
    tokenised = counted(records, f"tokenising {path}", len(records))
    samples = [(place, _encoded(encoder, record, place, names)) for place, record in tokenised]
    mute = _words_without_tokens(encoder, records, samples)
    kept, notes = _fit(encoder, samples, path)
    if not any(label != IGNORE for sample in kept for label in _labels_of(sample)):
        raise DataError(
            f"{path} has nothing to learn from",
            seen=f"{len(kept):,} samples without a label",
            do="raise max_length, or check the texts",
        )
    columns = make_columns(kept)
    lines = (*_described(encoder, records, kept, names), *_empty_texts(records), *mute, *notes)
    return TokenStore(columns, tuple(names), lines)


def encode_record(encoder: FileTokenizer, record: Any, place: str) -> Sample | None:
    """One record of a stream, encoded and fitted; None where it is longer than allowed and dropped."""
    found = read_record(encoder.task, record, place)
    sample = _encoded(encoder, found, place, ())
    if encoder.max_length is not None and _longest(sample) > encoder.max_length and encoder.overlong == "drop":
        return None
    return _fit(encoder, [(place, sample)], Path(place))[0][0]


def _encoded(encoder: FileTokenizer, record: Any, place: str, names: Sequence[str]) -> Sample:
    try:
        return _ENCODERS[type(record)](encoder, record, place, names)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what the tokenizers library raises is no Exception
            raise
        raise DataError(
            f"{place}: the tokenizer gives up on this text",
            seen=str(error)[:200],
            do="shorten the text, or use a tokenizer whose pattern needs fewer steps",
        ) from error


def _refuse_mixture(records: Sequence[Placed], path: Path) -> None:
    kinds = Counter(type(record).__name__ for _, record in records)
    if len(kinds) > 1:
        first = records[0][1]
        place = next(place for place, record in records if type(record) is not type(first))
        raise DataError(
            f"{path} mixes samples of several kinds",
            seen=f"{dict(kinds)}; the first other one is {place}",
            do="split the file by kind, so that it is clear what is learned from each",
        )


def _labels(records: Iterable[Placed]) -> list[str | int]:
    found: list[str | int] = []
    for _, record in records:
        if isinstance(record, Labelled):
            found.append(record.label)
        elif isinstance(record, Tagged):
            found += record.tags
    return found


def _of_chat(encoder: FileTokenizer, record: Any, place: str, names: Sequence[str]) -> Sample:
    tokenizer = encoder.tokenizer
    if tokenizer.chat_template is None:
        return _of_pair(encoder, _as_pair(record, place), place, names)
    ids, labels = encode_chat(tokenizer, record, place)
    return {"input_ids": ids, "labels": labels}


def _as_pair(chat: Chat, place: str) -> PromptCompletion:
    """A question and its answer need no template; a conversation does."""
    asked, answer = chat.messages[:-1], chat.messages[-1]
    if len(asked) != 1 or asked[0]["role"] != "user" or answer["role"] != ANSWERING:
        raise DataError(
            f"{place}: the tokenizer has no chat template for this conversation",
            seen=f"roles: {', '.join(message['role'] for message in chat.messages)}",
            do="give a template with --set chat_template=FILE, or use prompt + completion",
        )
    return PromptCompletion(str(asked[0]["content"]) + "\n", str(answer["content"]))


def _of_pair(encoder: FileTokenizer, record: Any, place: str, names: Sequence[str]) -> Sample:
    """Prompt and answer are encoded apart, as they are when the model is used: the prompt is there first."""
    tokenizer = encoder.tokenizer
    if encoder.task == "seq2seq":
        labels = tokenizer(text_target=record.answer)["input_ids"]
        return {"input_ids": _some(tokenizer(record.prompt)["input_ids"], place), "labels": _some(labels, place)}
    before = without_end(tokenizer, tokenizer(record.prompt)["input_ids"])
    after = with_end(tokenizer, tokenizer(record.answer, add_special_tokens=False)["input_ids"])
    return {"input_ids": _some([*before, *after], place), "labels": [IGNORE] * len(before) + _some(after, place)}


def _of_plain(encoder: FileTokenizer, record: Any, place: str, names: Sequence[str]) -> Sample:
    ids = _some(with_end(encoder.tokenizer, encoder.tokenizer(record.text)["input_ids"]), place)
    return {"input_ids": ids, "labels": ids}


def _of_labelled(encoder: FileTokenizer, record: Any, place: str, names: Sequence[str]) -> Sample:
    encoded = encoder.tokenizer(record.text, record.pair)
    types = {"token_type_ids": encoded["token_type_ids"]} if record.pair and "token_type_ids" in encoded else {}
    ids = _some(encoded["input_ids"], place)
    return {"input_ids": ids, f"{ONCE}labels": [number_of(record.label, names, place)], **types}


def _of_tagged(encoder: FileTokenizer, record: Any, place: str, names: Sequence[str]) -> Sample:
    """The first token of a word carries its tag; the others, and special tokens, carry none."""
    encoded = encoder.tokenizer(list(record.words), is_split_into_words=True)
    labels, before = [], None
    for word in encoded.word_ids():
        is_first = word is not None and word != before
        labels.append(number_of(record.tags[word], names, place) if is_first else IGNORE)
        before = word
    return {"input_ids": _some(encoded["input_ids"], place), "labels": labels}


def _empty_texts(records: Sequence[Placed]) -> list[str]:
    """What is learned of an empty text is the end alone; it is trained on, and named."""
    empty = [place for place, record in records if not all(text.strip() for text in _texts_of(record))]
    if not empty:
        return []
    return [
        f"warning: {len(empty):,} of {len(records):,} samples have an empty text, and are trained on all the same; the first "
        f"is {empty[0]}: remove such lines if they are not meant"
    ]


def _texts_of(record: Any) -> Iterable[str]:
    """What is learned from, or classified."""
    if isinstance(record, Chat):
        said = [
            m for m in record.messages[record.first_learned :] if m["role"] == ANSWERING and not m.get("tool_calls")
        ]
        return [str(message.get("content") or "") for message in said]
    if isinstance(record, PromptCompletion):
        return [record.answer]
    return [record.text] if isinstance(record, Plain | Labelled) else []


def _words_without_tokens(
    encoder: FileTokenizer, records: Sequence[Placed], samples: Sequence[tuple[str, Sample]]
) -> list[str]:
    """A tokenizer may make nothing of a word (a blank, a control character): its tag is then learned from nowhere."""
    lost: list[tuple[str, Tagged, int]] = []
    for (place, record), (_, sample) in zip(records, samples, strict=True):
        if isinstance(record, Tagged):
            number = len(record.tags) - sum(label != IGNORE for label in sample["labels"])
            lost += [(place, record, number)] if number else []
    if not lost:
        return []
    place, first, _ = lost[0]
    found = set(encoder.tokenizer(list(first.words), is_split_into_words=True).word_ids())
    at = next(at for at in range(len(first.words)) if at not in found)
    total = sum(number for *_, number in lost)
    return [
        f"{total:,} words in {len(lost):,} samples have no tokens, and their tags are not learned; the first is word "
        f"{at + 1} of {place}: {first.words[at]!r} ({first.tags[at]})"
    ]


_ENCODERS: Mapping[type, Callable[[FileTokenizer, Any, str, Sequence[str]], Sample]] = {
    Chat: _of_chat,
    PromptCompletion: _of_pair,
    Plain: _of_plain,
    Labelled: _of_labelled,
    Tagged: _of_tagged,
}


def _some(ids: Sequence[int], place: str) -> list[int]:
    if not ids:
        raise DataError(f"{place} has no tokens", seen="an empty text", do="remove that line")
    return list(ids)


def with_end(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The tokens of an answer, ended as the tokenizer ends a text."""
    end = tokenizer.eos_token_id
    return [*ids, end] if end is not None and (not ids or ids[-1] != end) else list(ids)


def without_end(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The tokens of a prompt: what a tokenizer appends to end a text is left to the answer."""
    return list(ids[:-1]) if ids and ids[-1] == tokenizer.eos_token_id else list(ids)


def _fit(encoder: FileTokenizer, samples: Sequence[tuple[str, Sample]], path: Path) -> tuple[list[Sample], list[str]]:
    most = encoder.max_length
    long = [(place, sample) for place, sample in samples if most is not None and _longest(sample) > most]
    if not long or most is None:
        return [sample for _, sample in samples], []
    words = f"{len(long):,} of {len(samples):,} samples have more than {most:,} tokens"
    if encoder.overlong == "refuse":
        place, worst = max(long, key=lambda one: _longest(one[1]))
        raise DataError(
            f"{path}: {words}",
            seen=f"{place} has {_longest(worst):,} tokens",
            do="--set overlong=drop leaves them out, --set overlong=cut keeps their beginnings; both are counted",
        )
    if encoder.overlong == "cut":
        cut = [_cut(sample, most) for _, sample in samples]
        mute = sum(1 for sample in cut if all(label == IGNORE for label in _labels_of(sample)))
        return cut, [f"{words}: cut" + (f"; {mute:,} have nothing left to learn" if mute else "")]
    gone = {place for place, _ in long}
    kept = [sample for place, sample in samples if place not in gone]
    if not kept:
        raise DataError(f"{path}: no sample is left", seen=f"{words}: dropped", do="raise max_length")
    return kept, [f"{words}: dropped"]


def _labels_of(sample: Sample) -> Sequence[int]:
    return sample.get("labels") or sample[f"{ONCE}labels"]


def _longest(sample: Sample) -> int:
    return max(len(part) for part in sample.values())


def _cut(sample: Sample, most: int) -> Sample:
    return {name: part[:most] for name, part in sample.items()}


def _described(
    encoder: FileTokenizer, records: Sequence[Placed], kept: Sequence[Sample], names: Sequence[str]
) -> list[str]:
    tokens = sum(len(sample["input_ids"]) for sample in kept)
    learned = sum(1 for sample in kept for label in _labels_of(sample) if label != IGNORE)
    lines = [f"{len(kept):,} samples, {tokens:,} tokens, {learned:,} labels"]
    if isinstance(records[0][1], Chat | PromptCompletion) and encoder.task == "causal_lm":
        is_plain = isinstance(records[0][1], Chat) and encoder.tokenizer.chat_template is None
        lines[0] += "; only answers are learned" + (
            " (no chat template: question, line end, answer)" if is_plain else ""
        )
    if names:
        lines.append(describe_labels((n for s in kept for n in _labels_of(s) if n != IGNORE), names))
    return lines
