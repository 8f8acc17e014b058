"""The user's model folder: its configuration, its tokenizer, and its weights under the head of a task.

Local folders and safetensors only; no code from the folder is run, nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer

from truebatch.errors import ConfigError, DataError
from truebatch.hf.load import (
    first_line,
    is_model_folder,
    load_config,
    load_part,
    load_weights_of,
    model_of_config,
)
from truebatch.hf.load import without_chatter as without_chatter
from truebatch.io.text_encoding import read_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "dpo": "AutoModelForCausalLM",
    "reward": "AutoModelForSequenceClassification",
    "embedding": "AutoModel",
    "vlm": "AutoModelForImageTextToText",
}
NOT_READ = "pooler."
"""Weights of a base model that embeddings do not go through: a folder of a language model has none."""
_TOKENIZER_FILES = ("*token*", "chat_template*", "vocab*", "merges*", "*.model")
_MOST_TEMPLATE_BYTES = 1 << 20
_POSITIONS = ("max_position_embeddings", "n_positions")


def load_configuration(folder: Path) -> Any:
    """The configuration of a model folder."""
    if not is_model_folder(folder):
        raise ConfigError(
            f"{folder} is not a model folder",
            seen="no config.json in it" if folder.is_dir() else "no such folder",
            do=f"save it with save_pretrained, or fetch it: hf download NAME --local-dir {folder}",
        )
    return load_config(folder)


def load_tokenizer(folder: Path, chat_template: Path | None) -> Any:
    """The tokenizer of a model folder, with another chat template if one is given."""
    tokenizer = load_part(AutoTokenizer, folder)
    if chat_template is not None:
        tokenizer.chat_template = read_text(chat_template, max_bytes=_MOST_TEMPLATE_BYTES)
    # A long sample is handled by the settings, and would otherwise be warned about one by one.
    tokenizer.model_max_length = 10**9
    return tokenizer


def tokenizer_fingerprint(folder: Path, chat_template: Path | None) -> str:
    """Changes with the files of the tokenizer, the template, and the version of transformers that renders it."""
    digest = hashlib.blake2b(transformers.__version__.encode(), digest_size=16)
    files = {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    for file in (*sorted(files), *([chat_template] if chat_template is not None else [])):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def num_positions(config: PretrainedConfig) -> int | None:
    """The longest sample a model has positions for; None if nothing says so, or positions are only relative."""
    text = config.get_text_config()
    if hasattr(text, "relative_attention_num_buckets"):
        return None
    found = [value for name in _POSITIONS if isinstance(value := getattr(text, name, None), int) and value > 0]
    # RoBERTa and its kin count positions from the pad id on.
    taken = (text.pad_token_id or 0) + 1 if "roberta" in str(text.model_type) else 0
    return min(found) - taken if found else None


def with_labels(config: PretrainedConfig, names: Sequence[str]) -> Any:
    """The configuration with these classes."""
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: at for at, name in enumerate(names)}
        config.problem_type = "single_label_classification"
    return config


def dropout_rates(config: PretrainedConfig) -> dict[str, float]:
    """Every dropout of a configuration that is above 0, by dotted name."""
    rates: dict[str, float] = {}
    for name, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            rates |= {f"{name}.{inner}": rate for inner, rate in dropout_rates(value).items()}
        elif "drop" in name and isinstance(value, float) and value > 0:
            rates[name] = value
    return rates


def without_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Set every dropout of a configuration to 0; what they were, by dotted name."""
    rates = dropout_rates(config)
    with_dropout(config, dict.fromkeys(rates, 0.0))
    return rates


def with_dropout(config: PretrainedConfig, rates: Mapping[str, float]) -> None:
    """Give a configuration these dropouts, by dotted name."""
    for path, rate in rates.items():
        *parts, name = path.split(".")
        owner = config
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, rate)


def shape_of(config: PretrainedConfig, task: str) -> nn.Module:
    """The model of a configuration without weights: enough to ask what its head needs."""
    with torch.device("meta"):
        return _loaded(lambda: model_of_config(_class_of(task), config), Path(config.name_or_path))  # type: ignore[no-any-return]


def load_weights(
    folder: Path, config: PretrainedConfig, task: str, *, seed: int, quantization: Any = None
) -> tuple[nn.Module, list[str]]:
    """The model of a folder under the head of a task, in fp32, and which parameters the folder had no weights for.

    Only the head of a classifier may be new; it is drawn by `seed`. `quantization` is a quantization_config of
    transformers.
    """
    torch.manual_seed(seed)
    is_classifier = task in ("sequence_classification", "token_classification", "reward")
    model, found = load_weights_of(
        _class_of(task), folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=is_classifier,
        output_loading_info=True, **({} if quantization is None else {"quantization_config": quantization}),
    )  # fmt: skip
    missing = sorted(found["missing_keys"])
    if any(not (task == "embedding" and name.startswith(NOT_READ)) for name in missing) and not is_classifier:
        raise DataError(
            f"{folder} has no weights for {len(missing)} parameters of a {task} model",
            seen=f"missing {missing[:4]}",
            do="check that the folder holds a model of that task",
        )
    resized = [str(key[0]) if isinstance(key, tuple | list) else str(key) for key in found["mismatched_keys"]]
    return model, [] if task == "embedding" else sorted({*missing, *resized})


def sketch_model(config: PretrainedConfig, task: str) -> nn.Module:
    """A model of the same shapes without weights: no file is read, and no memory is allocated for them."""
    with torch.device("meta"), without_chatter():
        model: nn.Module = model_of_config(_class_of(task), config, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]  # each name of a tied weight got one of its own
    return model


def _class_of(task: str) -> Any:
    return getattr(transformers, CLASSES[task])


def _loaded(call: Any, folder: Path) -> Any:
    try:
        return call()
    except Exception as error:  # a wrong configuration fails in any line of the model's own code
        raise DataError(
            f"{folder} cannot be used",
            seen=f"{type(error).__name__}: {first_line(error)}",
            do="check that the folder is complete and of this task: config.json, *.safetensors, tokenizer files",
        ) from error
