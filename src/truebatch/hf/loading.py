"""Load a Hugging Face model from a local folder: safetensors only, no code of others, no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import transformers
from torch import nn

from truebatch.errors import ConfigError, DataError
from truebatch.textfiles import nearest, read_text

MAX_BYTES = 16 << 20
MAX_LAYERS = 10_000
"""More than any model has: a file that asks for a billion would otherwise be built for hours."""
_LAYERS = re.compile(r"(n|num)(_\w+)?_layers?|depth")


def is_model_folder(path: str | Path) -> bool:
    """True if the folder looks like a saved Hugging Face model."""
    return (Path(path) / "config.json").is_file()


def load_model(folder: str | Path) -> nn.Module:
    """The model of a folder, in the class its configuration names and the dtype it was saved in."""
    path = Path(folder)
    model_class = _class_of(path)
    try:
        with without_chatter():
            model, found = model_class.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto",
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # a wrong configuration fails in any line of the model's own code
        raise DataError(
            f"the model in {path} cannot be loaded",
            seen=f"{type(error).__name__}: {first_line(error)}",
            do="save it again with save_pretrained (safetensors), and check that the folder is complete",
        ) from error
    _refuse_missing(path, sorted(map(str, found["missing_keys"])))
    loaded: nn.Module = model
    return loaded.eval()


def first_line(error: BaseException) -> str:
    """The first line of what an error says, for a message; an error may also say nothing."""
    return next(iter(str(error).strip().splitlines()), "")[:200]


@contextmanager
def without_chatter() -> Iterator[None]:
    """No bars and reports of transformers inside: what matters is said by the run itself."""
    log = transformers.utils.logging
    was_shown, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if was_shown:
            log.enable_progress_bar()


def _refuse_missing(path: Path, missing: list[str]) -> None:
    if missing:
        raise DataError(
            f"the model in {path} has no weights for {len(missing)} of its parameters",
            seen=f"missing {', '.join(missing[:4])}",
            do="bring the file of weights that belongs to this config.json; new ones would be random numbers",
        )


def _class_of(path: Path) -> Any:
    names = read_configuration(path).get("architectures")
    found = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ConfigError(
            f"the model in {path} names no class that this transformers has",
            seen=f"architectures={names}, transformers {transformers.__version__}",
            do="load it yourself and pass it as file.py:name, or save it from a class of transformers",
        )
    return found


def read_configuration(path: Path) -> dict[str, Any]:
    """What the config.json of a model folder says, after looking for what no model has."""
    file = path / "config.json"
    if not file.is_file():
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        hint = "" if path.exists() else nearest(path.name, beside)
        raise ConfigError(
            f"{path} is not a model folder{hint}",
            seen="no config.json in it" if path.is_dir() else "it is a file" if path.exists() else "no such folder",
            do="name a folder written by save_pretrained, or a target such as model.py:build",
        )
    text = read_text(file, max_bytes=MAX_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read", seen=str(error)[:200], do="save the model again with save_pretrained"
        ) from error
    if not isinstance(config, dict):
        raise DataError(f"{file} is not a configuration", seen=type(config).__name__, do="save the model again")
    for part in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        for name, value in part.items():
            if _LAYERS.fullmatch(name) and isinstance(value, int) and value > MAX_LAYERS:
                _refuse_layers(file, name, value)
    return config


def _refuse_layers(file: Path, name: str, value: int) -> NoReturn:
    raise DataError(
        f"{file} asks for more layers than any model has",
        seen=f"{name}={value:,}, at most {MAX_LAYERS:,} are built",
        do="save the model again with save_pretrained",
    )
