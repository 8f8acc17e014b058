"""What a model folder may hold, looked at before anything of it is loaded: a folder may come from anybody.

folder -> plain files -> config.json without code, links elsewhere and absurd counts -> tokenizer -> weights as safetensors
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil

from truebatch.errors import ConfigError, DataError
from truebatch.io.text_encoding import nearest, read_text
from truebatch.planning.lengths.tokenizer_file import MAX_BYTES as MAX_TOKENIZER_BYTES
from truebatch.planning.lengths.tokenizer_file import TOKENIZER, read_tokenizer_text

MAX_BYTES = 16 << 20
MAX_COUNTS = {
    re.compile(r"((n|num)(_\w+)?_|(^|.*_))(layers?|blocks?|depths?|stages?)"): 1_000,
    re.compile(r"\w*(n|num)_\w*experts\w*"): 10_000,
    re.compile(r"num_labels"): 1_000_000,
    re.compile(r"(n|num)_\w+"): 100_000_000,
}
"""More than any model has, by the name of the setting: a file that asks for a billion would be built for hours."""
_FOREIGN = re.compile(r"_?(attn|experts)_implementation(_internal)?|use_kernels")
_JSON_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_MOST_FILES = 10_000
_SAFE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_model_folder(path: str | Path) -> bool:
    """True if the folder looks like a saved Hugging Face model."""
    return (Path(path) / "config.json").is_file()


def check_files(folder: Path) -> None:
    """Refuse what is neither a file nor a folder (a pipe is read for ever), and texts larger than any model's."""
    for number, path in enumerate(sorted(folder.iterdir()) if folder.is_dir() else ()):
        if number >= _MOST_FILES or not (path.is_file() or path.is_dir()):
            what = "a link that leads nowhere" if path.is_symlink() else "a pipe, a device or a socket"
            raise DataError(
                f"{path} is not a regular file",
                seen=f"more than {_MOST_FILES:,} entries in the folder" if number >= _MOST_FILES else what,
                do="take it out of the model folder",
            )
        if path.is_dir() and path.suffix in (*_JSON_SUFFIXES, ".safetensors"):
            raise DataError(f"{path} is a folder, but a file is needed", seen="a folder", do="save the model again")
        if path.suffix in _JSON_SUFFIXES and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(
                f"{path} is too large for this kind of file",
                seen=f"{path.stat().st_size:,} bytes, at most {MAX_TOKENIZER_BYTES:,} are read",
                do="check that this is the file you meant",
            )
    if (folder / TOKENIZER).is_file():
        read_tokenizer_text(folder / TOKENIZER)


def check_weights(folder: Path) -> int:
    """The bytes of the weights, all in safetensors files of this folder; adapters on another model are refused."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise ConfigError(
            f"{folder} holds an adapter, which would load the model it names from elsewhere",
            seen=f"{adapter}",
            do="merge it first (peft: merge_and_unload, then save_pretrained), and name the merged folder",
        )
    names = _indexed(folder) if (folder / _INDEX).exists() else {_SAFE}
    found = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    if found > (memory := psutil.virtual_memory().total):
        raise DataError(
            f"the weights in {folder} do not fit into the memory of this machine",
            seen=f"{found:,} bytes, the machine has {memory:,}",
            do="use a larger machine or a smaller model",
        )
    return found


def _indexed(folder: Path) -> set[str]:
    values = _read_object(folder / _INDEX)
    places = values.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise DataError(f"{folder / _INDEX} names no files of weights", seen="weight_map", do="save the model again")
    outside = sorted({name for name in places.values() if Path(name).name != name or not name.endswith(".safetensors")})
    if outside:
        raise DataError(
            f"{folder / _INDEX} names weights that are no safetensors file of its folder",
            seen=repr(outside[0])[:200],
            do="save the model again with save_pretrained",
        )
    return set(places.values())


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
    config = _read_object(file)
    for name, value in _values(config):
        _check_value(file, name, value)
    return config


def _read_object(file: Path) -> dict[str, Any]:
    text = read_text(file, max_bytes=MAX_BYTES)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read", seen=str(error)[:200], do="save the model again with save_pretrained"
        ) from error
    if not isinstance(values, dict):
        raise DataError(f"{file} is not a configuration", seen=type(values).__name__, do="save the model again")
    return values


def _values(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All plain values of a configuration under the name they stand under, those of lists too."""
    left = [(name, part)]
    while left:
        name, one = left.pop()
        if isinstance(one, dict):
            left += [(str(key), value) for key, value in one.items()]
        elif isinstance(one, list):
            left += [(name, value) for value in one]
        else:
            yield name, one


def _check_value(file: Path, name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        for pattern, most in MAX_COUNTS.items():
            if pattern.fullmatch(name) and value > most:
                _refuse_count(file, name, value, most)
    if _FOREIGN.fullmatch(name) and ((isinstance(value, str) and "/" in value) or value is True):
        raise DataError(
            f"{file} asks for code from elsewhere",
            seen=f"{name}={value!r}",
            do="remove that line: attention is chosen here, and no code of a model folder is run",
        )
    if name == "use_pretrained_backbone" and value:
        raise DataError(
            f"{file} asks for weights from elsewhere", seen=f"{name}={value!r}",
            do="save the whole model with save_pretrained: only weights of its own folder are loaded",
        )  # fmt: skip


def _refuse_count(file: Path, name: str, value: int, most: int) -> NoReturn:
    raise DataError(
        f"{file} asks for more than any model has",
        seen=f"{name}={value:,}, at most {most:,} are built",
        do="save the model again with save_pretrained",
    )


def check_pipeline(folder: Path) -> None:
    """Refuse a pipeline of diffusers that names classes of other packages or brings code; its parts are looked at too."""
    index = folder / "model_index.json"
    values = _read_object(index)
    for name, place in values.items():
        library = place[0] if isinstance(place, list) and place else None
        is_known = library is None or library in ("diffusers", "transformers") or _is_pipeline_module(library)
        if not is_known or (name == "_class_name" and not isinstance(place, str)):
            _refuse_part(index, name, place)
    parts = [part for part in sorted(folder.iterdir()) if part.is_dir()]
    for part in (folder, *parts):
        check_files(part)
        if (part / "config.json").is_file():
            read_configuration(part)
        code = sorted(part.glob("*.py"))
        if code:
            raise DataError(f"{part} brings code", seen=str(code[0]), do="remove it: no code of a model folder is run")


def _is_pipeline_module(name: Any) -> bool:
    """Older pipelines name a module of diffusers.pipelines, such as stable_diffusion."""
    if not isinstance(name, str) or not name.isidentifier() or find_spec("diffusers") is None:
        return False
    return find_spec(f"diffusers.pipelines.{name}") is not None


def _refuse_part(index: Path, name: str, place: Any) -> NoReturn:
    raise DataError(
        f"{index} names a class that is neither of diffusers nor of transformers",
        seen=f"{name}={str(place)[:100]}",
        do="use a pipeline whose parts are classes of these packages; no code of a model folder is run",
    )
