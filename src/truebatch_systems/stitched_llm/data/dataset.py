"""The text of a stitched model: encoded by the bottom donor's tokenizer, cached, with the labels of its own vocabulary.

Everything about files, tokenizers and caches is that of `truebatch train hf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truebatch.errors import DataError
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import HeadSamples, PreparedRun, prepare
from truebatch.hf.heads.losses import IGNORE
from truebatch.training.config import TrainConfig
from truebatch_systems.stitched_llm.config import StitchConfig
from truebatch_systems.stitched_llm.data.toy_donors import embedded_folder
from truebatch_systems.stitched_llm.data.vocab_map import NOBODY
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
        return Sources(
            config.bottom, config.top, config.bottom, config.data, config.validation, config.test or config.validation
        )
    home = embedded_folder(samples=config.made_up_samples, steps=config.donor_steps, seed=config.made_up_seed)
    files = {name: home / f"{name}.jsonl" for name in ("train", "validation", "test")}
    return Sources(home / "bottom", home / "top", home / "tokenizer", *files.values())


def prepare_texts(config: StitchConfig) -> PreparedRun:
    """The texts to train on and to validate with, encoded; read again only where a file has changed."""
    return prepare(_training(config))


def load_test(config: StitchConfig) -> HeadSamples | None:
    """Samples that no choice was made on."""
    file = sources_of(config).test
    return None if file is None else prepare(_finetune(config, file, None)).samples


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


def refuse_unknown_labels(samples: Any, vocabulary: Tensor) -> None:
    """Raise where the data has tokens to learn that the top donor has no counterpart for."""
    for number in range(len(samples)):
        labels = torch.as_tensor(samples[number]["labels"])[1:]
        learned = labels[labels != IGNORE]
        lost = learned[vocabulary[learned] == NOBODY]
        if len(lost):
            raise DataError(
                f"sample {number} has tokens that the top donor does not know",
                seen=f"id {int(lost[0])} ({len(lost)} of {len(learned)} labels of this sample)",
                do="add them to vocabulary_map, or leave such samples out",
            )
