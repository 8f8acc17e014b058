"""Folders that hold an engine: a whole model, or an adapter of peft beside the folder of its base; and their tokenizers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from truebatch.errors import ConfigError, DataError
from truebatch.hf.adapter_checks import ADAPTER, WEIGHTS, check_adapter, read_adapter_settings
from truebatch.hf.load import first_line, load_model, load_part, without_chatter

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def load_engine(folder: str | Path) -> nn.Module:
    """The model of a folder; of an adapter's folder, its base with the adapter beside the layers."""
    path = Path(folder)
    if not (path / ADAPTER).is_file():
        return load_model(path)
    if not (path / WEIGHTS).is_file():
        raise DataError(
            f"the adapter in {path} has no safetensors", seen=f"no {WEIGHTS}", do="save it again with save_pretrained"
        )
    base = _base_of(path)
    check_adapter(path)
    model: Any = load_model(base)
    try:
        with without_chatter():
            model.load_adapter(str(path))
    except ImportError as error:
        raise ConfigError(
            "an adapter needs the package peft", seen=str(error), do="pip install 'truebatch[peft]'"
        ) from error
    except Exception as error:  # a wrong configuration fails in any line of peft
        raise DataError(
            f"the adapter in {path} cannot be loaded",
            seen=f"{type(error).__name__}: {first_line(error)}",
            do="save it again with save_pretrained, and check that it belongs to its base model",
        ) from error
    ready: nn.Module = model.eval()
    return ready


def _base_of(path: Path) -> Path:
    """The folder of the base model that an adapter names; nothing is fetched."""
    base = read_adapter_settings(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not os.path.isdir(base):
        raise ConfigError(
            f"the adapter in {path} names a base model that is not a folder here",
            seen=f"base_model_name_or_path={base!r}",
            do="write the folder of the base model there; nothing is downloaded",
        )
    return Path(base)


def read_tokenizer(folder: str | Path) -> Any | None:
    """The tokenizer of a folder; None where it holds none."""
    path = Path(folder)
    if not any((path / name).is_file() for name in TOKENIZERS):
        return None
    return load_part(AutoTokenizer, path)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """A text as this tokenizer hands it to its model, with the tokens that it adds."""
    found: Sequence[int] = tokenizer(text)["input_ids"]
    return [int(i) for i in found]
