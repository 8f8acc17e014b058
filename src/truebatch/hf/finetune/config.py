"""Settings of `truebatch train hf`: which model, which data, what to learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from truebatch.errors import ConfigError
from truebatch.hf.finetune.preference.config import PreferenceConfig
from truebatch.io.text_encoding import nearest
from truebatch.planning.config import Overlong
from truebatch.training.config import TrainConfig

Task = Literal[
    "causal_lm", "sequence_classification", "token_classification", "seq2seq", "dpo", "reward", "embedding", "vlm"
]
Tower = Literal["frozen", "trained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """A model folder and a data file."""

    model: Path
    """A folder written by save_pretrained (the model, and its tokenizer), or a name of the Hugging Face Hub."""
    data: Path
    """Samples to train on, one JSON object a line (.json, .csv and .parquet too)."""
    task: Task
    """What is learned: the next token, a class of the text, a class of each word, a text from another, the better of two
    answers (dpo: by the model that writes, reward: by one that judges), embeddings, or (vlm)
    answers about images."""
    streaming: bool = False
    """Encode samples as they are read, in windows (train.window), instead of all before; a dataset of the Hub is one."""
    validation: Path | None = None
    """Samples that are never trained on."""
    max_length: int | None = None
    """Most tokens of a sample; by default as many as the model has positions."""
    overlong: Overlong = "refuse"
    """What becomes of a sample with more: refuse stops, drop leaves it out, cut keeps its beginning; both are counted."""
    dropout: bool = True
    """Train with the dropout of the model's configuration, drawn for each sample; false sets it to 0."""
    image_folder: Path | None = None
    """task vlm: where relative paths of images begin; by default the folder of the data file."""
    tower: Tower = "frozen"
    """task vlm: whether the part that reads pixels is trained too; what joins it to the language model always is,
    unless lora trains adapters alone."""
    chat_template: Path | None = None
    """A Jinja file, instead of the tokenizer's own template."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """Embeddings: from which states; auto is what a folder of sentence-transformers says, else mean (decoders: last)."""
    temperature: float = 0.05
    """Embeddings: cosines are divided by it before the softmax over the positives and negatives of the whole step."""
    lora: bool = False
    """Train an adapter (LoRA) beside the frozen model."""
    lora_rank: int = 16
    lora_alpha: float = 32.0
    merge_lora: bool = False
    """Export the whole model with the adapter added to its weights, instead of the adapter alone."""
    load_in_4bit: bool = False
    """Keep the frozen base of an adapter in four bits (QLoRA, NF4; package bitsandbytes)."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise ConfigError(
                f"the task is not known{nearest(str(self.task), list(get_args(Task)))}",
                seen=f"task={self.task!r}",
                do=f"use one of: {', '.join(get_args(Task))}",
            )
        if self.tower not in get_args(Tower):
            raise ConfigError(
                "the tower is frozen or trained", seen=f"tower={self.tower!r}", do="use one of these words"
            )
        self._check_images()
        for name in ("merge_lora", "load_in_4bit"):
            if getattr(self, name) and not self.lora:
                raise ConfigError(
                    f"{name} is for a run that trains an adapter", seen=f"{name}=true, lora=false", do="add --lora"
                )
        if self.load_in_4bit and self.train.shard:
            raise ConfigError(
                "quantised weights cannot be sharded",
                seen="load_in_4bit=true, train.shard=true",
                do="leave one of them out: a base in four bits takes an eighth of the memory of one in fp32",
            )
        self._check_embedding()
        for name in ("max_length", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1", seen=f"{name}={value!r}", do=f"raise {name}")

    def _check_embedding(self) -> None:
        given = [
            name for name, default in (("pooling", "auto"), ("temperature", 0.05)) if getattr(self, name) != default
        ]
        if given and self.task != "embedding":
            raise ConfigError(
                f"{given[0]} is for embeddings",
                seen=f"{given[0]}={getattr(self, given[0])!r}, task={self.task!r}",
                do="leave it out, or add --task embedding",
            )
        if self.pooling not in ("auto", "mean", "cls", "last"):
            raise ConfigError(
                "the pooling is not known", seen=f"pooling={self.pooling!r}", do="use one of: auto, mean, cls, last"
            )
        if not self.temperature > 0:
            raise ConfigError(
                "the temperature must be above 0",
                seen=f"temperature={self.temperature!r}",
                do="use 0.05, or 0.01 to 0.1",
            )
        if self.task == "embedding" and self.streaming:
            raise ConfigError(
                "pairs of texts are read as a whole", seen="task='embedding', streaming=true", do="leave streaming out"
            )

    def _check_images(self) -> None:
        given = [name for name in ("image_folder", "tower") if getattr(self, name) not in (None, "frozen")]
        if given and self.task != "vlm":
            raise ConfigError(
                f"{given[0]} is for a model that reads images",
                seen=f"task={self.task}",
                do="use --task vlm, or leave it out",
            )
        if self.task == "vlm" and self.streaming:
            raise ConfigError(
                "records with images are not read as a stream: their lengths come from the headers of all images",
                seen="task=vlm, streaming=true",
                do="leave streaming out; pixels are read when a sample is trained on, not before",
            )
