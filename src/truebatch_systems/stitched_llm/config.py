"""Settings of `truebatch train stitched_llm`: two donors, where they are cut, what joins them, what is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from truebatch.errors import ConfigError
from truebatch.planning.config import Overlong
from truebatch.training.config import TrainConfig
from truebatch.training.optim.lr_schedules import Shape
from truebatch_systems.stitched_llm.model.adapter import Kind
from truebatch_systems.stitched_llm.model.stitch import Start

Stored = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Vocabulary = Literal["same", "by_text", "retokenize"]
Unmatched = Literal["mask", "drop", "refuse"]
Part = Literal["norms", "head", "first_layers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StitchTrain(TrainConfig):
    """Settings of training, with the defaults of the original script where it has one."""

    epochs: int = 3
    batch_size: int | None = 8
    gradient_accumulation_steps: int = 4
    learning_rate: float = 1e-3
    schedule: Shape = "cosine"
    weight_decay: float = 0.01
    save_every: int | None = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class StitchConfig:
    """Two donors and a text. Without any of them two tiny donors are trained on made-up text first."""

    bottom: Path | None = None
    """A folder written by save_pretrained: gives the embedding, the first layers and the tokenizer."""
    top: Path | None = None
    """A folder written by save_pretrained: gives the last layers, the final norm and the output layer."""
    cut_bottom: int | None = None
    """Layers kept from the bottom donor; by default half of them."""
    cut_top: int | None = None
    """First layer used of the top donor; by default at the same share of its depth."""
    adapter: Kind = "linear"
    """linear, low_rank, mlp (with a linear skip), or identity."""
    rank: int = 64
    """Of a low_rank adapter."""
    inner: int = 256
    """Hidden width of an mlp adapter."""
    norm: bool = False
    """An RMSNorm in front of the adapter."""
    start: Start = "lstsq"
    """lstsq: fitted to both donors on the training text; random; identity: dimensions both have are copied."""
    start_tokens: int | None = None
    """Tokens the lstsq start is fitted on; by default sixteen times the width of the bottom donor, at least 8192."""
    also_train: tuple[Part, ...] = ()
    """Trained beside the adapter, of the top donor: its norms, its output layer, its first layers."""
    first_layers: int = 1
    """How many layers `first_layers` are."""
    lora: bool = False
    """Train LoRA matrices beside the linear layers of the top donor (package peft)."""
    lora_rank: int = 8
    lora_alpha: float = 16.0
    stored: Stored = "auto"
    """How frozen donors are kept: auto follows train.precision; int8 quantises their linear layers (package torchao)."""
    vocabulary: Vocabulary = "same"
    """same refuses two vocabularies; by_text matches tokens of the same bytes; retokenize: each donor reads its own tokens."""
    vocabulary_map: Path | None = None
    """A JSON object, {"id below": id above}, instead."""
    unmatched: Unmatched = "mask"
    """Tokens to learn without a partner: mask reads and never learns them, drop leaves their samples out, refuse stops."""
    data: Path | None = None
    """Texts to train on: .jsonl with `text` (or prompt + completion, messages), .csv, .parquet, .txt."""
    validation: Path | None = None
    """Texts that are never trained on."""
    test: Path | None = None
    """Texts for `truebatch evaluate`; by default those of validation."""
    max_length: int | None = 2048
    """Most tokens of a sample."""
    overlong: Overlong = "refuse"
    """What becomes of a sample with more: refuse stops, drop leaves it out, cut keeps its beginning; both are counted."""
    made_up_samples: int = 4000
    """Without donors and data: how many texts are made up."""
    donor_steps: int = 300
    """Without donors: how many steps each tiny donor is trained."""
    made_up_seed: int = 0
    train: StitchTrain = field(default_factory=StitchTrain)

    def __post_init__(self) -> None:
        _check_words(self)
        _check_sources(self)
        counts = ("rank", "inner", "first_layers", "lora_rank", "made_up_samples", "donor_steps", "start_tokens")
        for name, least in (*((name, 1) for name in (*counts, "cut_bottom", "max_length")), ("cut_top", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be at least {least}", seen=f"{name}={getattr(self, name)}", do=f"raise {name}"
                )
        if self.lora and self.stored == "int8":
            raise ConfigError(
                "LoRA matrices stand beside plain linear layers",
                seen="lora=true, stored=int8",
                do="leave one of them out",
            )
        if self.adapter == "identity" and self.start != "identity":
            raise ConfigError(
                "an identity adapter has no other start",
                seen=f"adapter=identity, start={self.start}",
                do="--set start=identity",
            )
        if self.adapter == "identity" and not self.also_train and not self.lora:
            raise ConfigError(
                "nothing would be trained", seen="adapter=identity alone", do="--set lora=true, or another adapter"
            )

    @property
    def is_embedded(self) -> bool:
        """True where donors and text are made here."""
        return self.bottom is None


def _check_words(config: StitchConfig) -> None:
    for name, value, known in (
        ("adapter", config.adapter, get_args(Kind)),
        ("start", config.start, get_args(Start)),
        ("stored", config.stored, get_args(Stored)),
        ("vocabulary", config.vocabulary, get_args(Vocabulary)),
        ("unmatched", config.unmatched, get_args(Unmatched)),
        *(("also_train", part, get_args(Part)) for part in config.also_train),
    ):
        if value not in known:
            raise ConfigError(f"{name} is not known", seen=f"{name}={value!r}", do=f"use one of: {', '.join(known)}")


def _check_sources(config: StitchConfig) -> None:
    given = {name: getattr(config, name) is not None for name in ("bottom", "top", "data")}
    if any(given.values()) and not all(given.values()):
        raise ConfigError(
            "a bottom donor, a top donor and data go together",
            seen=f"without {', '.join(name for name, is_given in given.items() if not is_given)}",
            do="give all three (--set bottom=DIR --set top=DIR --set data=FILE), or none for the embedded example",
        )
    if config.is_embedded and (config.validation is not None or config.test is not None):
        raise ConfigError(
            "made-up text brings its own validation and test",
            seen=f"validation={config.validation}, test={config.test}",
            do="give bottom, top and data too, or leave them out",
        )
