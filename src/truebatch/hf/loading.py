"""Load a Hugging Face model from a local folder: safetensors only, no code of others, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import nn

from truebatch.errors import ConfigError, DataError


def is_model_folder(path: str | Path) -> bool:
    """True if the folder looks like a saved Hugging Face model."""
    return (Path(path) / "config.json").is_file()


def load_model(folder: str | Path) -> nn.Module:
    """The model of a folder, in the class its configuration names and the dtype it was saved in."""
    path = Path(folder)
    model_class = _class_of(path)
    try:
        model: nn.Module = model_class.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise DataError(
            f"the model in {path} cannot be loaded",
            seen=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
            do="save it again with save_pretrained (safetensors), and check that the folder is complete",
        ) from error
    return model.eval()


def _class_of(path: Path) -> Any:
    config = _read_config(path)
    names = config.get("architectures") or []
    found = getattr(transformers, str(names[0]), None) if names else None
    if found is None:
        raise ConfigError(
            f"the model in {path} names no class that this transformers has",
            seen=f"architectures={names}, transformers {transformers.__version__}",
            do="load it yourself and pass it as file.py:name, or save it from a class of transformers",
        )
    return found


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{path} is not a model folder",
            seen="no config.json in it" if path.is_dir() else "no such folder",
            do="name a folder written by save_pretrained, or a target such as model.py:build",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(
            f"{file} cannot be read", seen=str(error)[:200], do="save the model again with save_pretrained"
        ) from error
    if not isinstance(config, dict):
        raise DataError(f"{file} is not a configuration", seen=type(config).__name__, do="save the model again")
    return config
