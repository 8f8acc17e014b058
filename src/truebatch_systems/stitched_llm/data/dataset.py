"""The text of a stitched model: encoded by the bottom donor's tokenizer, cached, with the labels of its own vocabulary.

Everything about files, tokenizers and caches is that of `truebatch train hf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.errors import DataError
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import HeadSamples, PreparedRun, prepare
from truebatch.hf.finetune.token_store import Column, TokenStore, make_columns
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.load import load_config
from truebatch.hf.pretrained import load_tokenizer
from truebatch.training.config import TrainConfig
from truebatch_systems.stitched_llm.config import StitchConfig, Unmatched
from truebatch_systems.stitched_llm.data.toy_donors import embedded_folder
from truebatch_systems.stitched_llm.data.vocab_map import NOBODY, match_by_bytes, read_vocabulary_map
from truebatch_systems.stitched_llm.model.stitch import Rows


@dataclass(frozen=True, slots=True)
class Sources:
    """Where donors, tokenizer and texts of a run are."""

    bottom: Path
    top: Path
    tokenizer: Path
    train: Path
    validation: Path | None
    test: Path | None


def sources_of(config: StitchConfig) -> Sources:
    """As the settings say, or the embedded example in the cache folder (its donors need not be there yet)."""
    if not config.is_embedded:
        assert config.bottom is not None  # StitchConfig has checked that all three are given
        assert config.top is not None
        assert config.data is not None
        speaker = config.top if config.vocabulary == "retokenize" else config.bottom
        return Sources(
            config.bottom, config.top, speaker, config.data, config.validation, config.test or config.validation
        )
    home = embedded_folder(samples=config.made_up_samples, steps=config.donor_steps, seed=config.made_up_seed)
    files = {name: home / f"{name}.jsonl" for name in ("train", "validation", "test")}
    return Sources(home / "bottom", home / "top", home / "tokenizer", *files.values())


def prepare_texts(config: StitchConfig) -> PreparedRun:
    """The texts to train on and to validate with, encoded; read again only where a file has changed."""
    ready = prepare(_training(config))
    vocabulary = vocabulary_of(config)
    if vocabulary is None:
        return ready
    held = ready.validation
    assert isinstance(ready.train, TokenStore)  # nothing is streamed here, and these are texts
    assert held is None or isinstance(held, TokenStore)
    return replace(
        ready,
        train=leave_out_unmatched(ready.train, vocabulary, config.unmatched, "training"),
        validation=held and leave_out_unmatched(held, vocabulary, config.unmatched, "validation"),
    )


def load_test(config: StitchConfig) -> HeadSamples | None:
    """Samples that no choice was made on."""
    file = sources_of(config).test
    if file is None:
        return None
    ready, vocabulary = prepare(_finetune(config, file, None)), vocabulary_of(config)
    assert isinstance(ready.train, TokenStore)
    kept = ready.train
    if vocabulary is not None:
        kept = leave_out_unmatched(kept, vocabulary, config.unmatched, "test")
    return HeadSamples(kept, ready.head)


def vocabulary_of(config: StitchConfig) -> Tensor | None:
    """[ids of the bottom donor] the id of the same token in the top one, -1 for none; None where they must be one."""
    if config.vocabulary != "by_text" and config.vocabulary_map is None:
        return None
    places = sources_of(config)
    size = int(load_config(places.bottom).get_text_config().vocab_size)
    if config.vocabulary_map is not None:
        return read_vocabulary_map(config.vocabulary_map, size=size)
    return _matched(places.bottom, places.top, size, int(load_config(places.top).get_text_config().vocab_size))


@lru_cache(maxsize=2)
def _matched(bottom: Path, top: Path, size: int, top_size: int) -> Tensor:
    return match_by_bytes(load_tokenizer(bottom, None), load_tokenizer(top, None), size=size, top_size=top_size)


def _training(config: StitchConfig) -> FinetuneConfig:
    places = sources_of(config)
    return _finetune(config, places.train, places.validation)


def _finetune(config: StitchConfig, file: Path, validation: Path | None) -> FinetuneConfig:
    return FinetuneConfig(
        model=sources_of(config).tokenizer, data=file, validation=validation, task="causal_lm",
        max_length=config.max_length, overlong=config.overlong, train=TrainConfig(seed=config.train.seed),
    )  # fmt: skip


def first_rows(samples: Any, *, tokens: int, batch: int = 16) -> Iterator[Rows]:
    """Rows of the first samples, padded on the right, until they hold this many tokens."""
    seen = at = 0
    while seen < tokens and at < len(samples):
        ids = [torch.as_tensor(samples[i]["input_ids"]) for i in range(at, min(at + batch, len(samples)))]
        at, seen = at + len(ids), seen + sum(len(one) for one in ids)
        yield pad_right(ids)


def pad_right(samples: list[Tensor]) -> Rows:
    """[B, L] ids and the tokenizer's mask."""
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


def leave_out_unmatched(store: TokenStore, vocabulary: Tensor, unmatched: Unmatched, part: str) -> TokenStore:
    """What the top donor has no token for is not learned (mask), or its samples are left out (drop); both are counted."""
    labels, number = store.columns["labels"], len(store)
    is_learned = labels.values != IGNORE
    is_learned[labels.starts[:-1]] = False  # the first token is predicted from nothing
    partner = vocabulary.numpy()[np.where(is_learned, labels.values, 0)]
    is_lost = is_learned & (partner == NOBODY)
    lost, tokens = int(is_lost.sum()), int(is_learned.sum())
    if not lost:
        return store
    with_lost = np.add.reduceat(is_lost, labels.starts[:-1]) > 0
    if unmatched == "refuse":
        raise _unmatched_error(store, is_lost, int(np.flatnonzero(with_lost)[0]), lost, tokens)
    share = f"{lost:,} of {tokens:,} tokens to learn ({lost / tokens:.1%}) have no partner in the top donor"
    if unmatched == "mask":
        column = Column(np.where(is_lost, IGNORE, labels.values), labels.starts)
        words = f"{part}: {share}: they are read, not learned (unmatched=mask)"
        return replace(store, columns={**store.columns, "labels": column}, notes=(*store.notes, words))
    kept = np.flatnonzero(~with_lost)
    words = f"{part}: {share}: {number - len(kept):,} of {number:,} samples are left out (unmatched=drop)"
    if not len(kept):
        raise DataError(f"{part}: no sample is left", seen=words, do="--set unmatched=mask, or vocabulary=retokenize")
    columns = make_columns([store[int(i)] for i in kept])
    return replace(store, columns=columns, notes=(*store.notes, words))


def _unmatched_error(store: TokenStore, is_lost: Any, sample: int, lost: int, tokens: int) -> DataError:
    column = store.columns["labels"]
    own = slice(column.starts[sample], column.starts[sample + 1])
    first = int(column.values[own][is_lost[own]][0])
    return DataError(
        f"sample {sample} has tokens that the top donor does not know",
        seen=f"id {first}; {lost:,} of {tokens:,} tokens to learn",
        do="--set unmatched=mask (they are not learned) or unmatched=drop, or add them to vocabulary_map",
    )
