"""Folders of sentence-transformers: how their texts are pooled, and the files beside the weights that say so."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.hf.embedding.pooling import Pooling
from truebatch.io.atomic_files import read_json, write_json

MODULES = "modules.json"
_MOST_BYTES = 1 << 20
_FIRST = "sentence_bert_config.json"
_KEPT = (_FIRST, "config_sentence_transformers.json")
_NAMES: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FORMER: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def is_sentence_folder(folder: Path) -> bool:
    """Whether sentence-transformers wrote this folder."""
    return (folder / MODULES).is_file()


def pooling_of(folder: Path) -> Pooling | None:
    """How a folder of sentence-transformers pools; None for another folder, `ConfigError` for what is not known here."""
    if not is_sentence_folder(folder):
        return None
    modules = read_json(folder / MODULES, max_bytes=_MOST_BYTES)
    kinds = {str(module["type"]).rpartition(".")[2]: folder / str(module.get("path", "")) for module in modules}
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if unknown or "Pooling" not in kinds or kinds.get("Transformer", folder) != folder:
        raise ConfigError(
            f"{folder} has modules that are not trained here",
            seen=f"{', '.join(kinds)}"
            + (f"; weights in {kinds['Transformer'].name}" if "Transformer" in kinds else ""),
            do="give a folder with a Transformer at its top, a Pooling and perhaps a Normalize, or train it with "
            "truebatch.adapters.sentence_transformers",
        )
    settings = read_json(kinds["Pooling"] / "config.json", max_bytes=_MOST_BYTES)
    modes = _modes(settings)
    if len(modes) != 1 or modes[0] not in _NAMES or settings.get("include_prompt", True) is False:
        raise ConfigError(
            f"{folder} pools in a way that is not known here",
            seen=f"pooling {', '.join(modes) or 'none'}, include_prompt={settings.get('include_prompt', True)}",
            do="use mean, cls or lasttoken with the prompt included",
        )
    return _NAMES[modes[0]]


def _modes(settings: Mapping[str, Any]) -> list[str]:
    given = settings.get("pooling_mode")
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    return [name for key, name in _FORMER.items() if settings.get(key)]


def max_length_of(folder: Path) -> int | None:
    """The length that sentence-transformers cuts texts to, where the folder says one."""
    if not is_sentence_folder(folder) or not (folder / _FIRST).is_file():
        return None
    found = read_json(folder / _FIRST, max_bytes=_MOST_BYTES).get("max_seq_length")
    return found if isinstance(found, int) and found > 0 else None


def write_sentence_files(source: Path, folder: Path, *, pooling: Pooling, width: int, max_length: int | None) -> None:
    """Beside exported weights: what sentence-transformers needs to load them, as it was in `source` or anew."""
    if pooling_of(source) == pooling:
        for module in read_json(source / MODULES, max_bytes=_MOST_BYTES):
            if module.get("path"):
                shutil.copytree(source / module["path"], folder / module["path"], dirs_exist_ok=True)
        for name in (MODULES, *_KEPT):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {key: _NAMES.get(name) == pooling for key, name in _FORMER.items()}
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes, "include_prompt": True}
    )
    write_json(folder / _FIRST, {"max_seq_length": max_length, "do_lower_case": False})
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"))
    write_json(
        folder / MODULES,
        [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(kinds)
        ],
    )
