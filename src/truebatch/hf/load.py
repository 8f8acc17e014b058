"""Load what a Hugging Face folder holds: safetensors only, no foreign code, no network. All models are loaded here.

folder -> files looked at -> config.json -> shapes without memory -> weights; a test finds every other `from_pretrained`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from truebatch.errors import ConfigError, DataError, TruebatchError
from truebatch.hf.folder_checks import check_files, check_pipeline, check_weights, is_model_folder, read_configuration
from truebatch.progress import stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "first_line", "is_model_folder", "load_config", "load_model", "load_part", "load_pipeline", "load_weights_of",
    "model_of_config", "without_chatter",
]  # fmt: skip

_SPARE_PARAMETERS = 100_000_000
"""A new head of a classifier may have these more than the folder holds; so may small models in any format."""
_PARAMETERS_A_BYTE = 2
"""Of weights of four bits."""


def load_model(folder: str | Path) -> nn.Module:
    """The model of a folder, in the class its configuration names and the dtype it was saved in."""
    path = Path(folder)
    model, found = load_weights_of(_class_of(path), path, dtype="auto", output_loading_info=True)
    _refuse_missing(path, sorted(map(str, found["missing_keys"])))
    loaded: nn.Module = model
    return loaded.eval()


def load_config(folder: str | Path) -> Any:
    """The configuration of a model folder."""
    read_configuration(Path(folder))
    return load_part(transformers.AutoConfig, folder)


def load_part(kind: Any, folder: str | Path) -> Any:
    """A configuration, a tokenizer or a processor of a model folder: whatever has no weights."""
    path = Path(folder)
    try:
        check_files(path)
        with without_chatter():
            return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except TruebatchError:
        raise
    except Exception as error:  # a wrong file fails in any line of its library
        name = {"AutoConfig": "configuration", "AutoTokenizer": "tokenizer"}.get(
            kind.__name__, "tokenizer or processor"
        )
        raise DataError(
            f"{path} has no {name} that can be used",
            seen=f"{type(error).__name__}: {first_line(error)}",
            do="save it beside the model with save_pretrained, and check that the folder is complete",
        ) from error


def load_weights_of(kind: Any, folder: str | Path, **settings: Any) -> Any:
    """What `kind.from_pretrained` makes of the weights of a model folder."""
    path = Path(folder)
    read_configuration(path)
    check_files(path)
    stored = check_weights(path)
    try:
        _check_size(kind, path, settings.get("config"), stored)
        with without_chatter(), stage(f"loading {path}"):
            return kind.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_safetensors=True, **settings
            )
    except TruebatchError:
        raise
    except Exception as error:  # a wrong configuration fails in any line of the model's own code
        raise DataError(
            f"the model in {path} cannot be loaded",
            seen=f"{type(error).__name__}: {first_line(error)}",
            do="save it again with save_pretrained (safetensors), and check that the folder is complete",
        ) from error


def load_pipeline(kind: Any, folder: str | Path, **settings: Any) -> Any:
    """A pipeline of diffusers from its folder, every part of it looked at first."""
    path = Path(folder)
    index = path / "model_index.json"
    if not index.is_file():
        raise ConfigError(
            f"{path} is not the folder of a pipeline",
            seen="no model_index.json in it" if path.is_dir() else "no such folder",
            do="name a folder written by the save_pretrained of a diffusers pipeline; nothing is downloaded",
        )
    check_pipeline(path)
    with stage(f"loading {path}"):
        return kind.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, **settings
        )


def model_of_config(kind: Any, config: PretrainedConfig, **settings: Any) -> Any:
    """A model of a configuration without weights, never in a class of a model folder."""
    return kind.from_config(config, trust_remote_code=False, **settings)


def _check_size(kind: Any, path: Path, config: PretrainedConfig, stored: int) -> None:
    """Refuse a configuration that asks for far more numbers than the folder holds, before memory is allocated for them."""
    config = load_config(path) if config is None else config
    with torch.device("meta"), without_chatter(), no_init_weights():
        model = kind._from_config(config) if hasattr(kind, "config_class") else model_of_config(kind, config)
    asked = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    if asked > stored * _PARAMETERS_A_BYTE + _SPARE_PARAMETERS:
        raise DataError(
            f"the config.json in {path} asks for a model far larger than its weights",
            seen=f"{asked:,} numbers, the files of weights have {stored:,} bytes",
            do="bring the weights that belong to this config.json, or save the model again with save_pretrained",
        )


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
