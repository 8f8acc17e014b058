"""Names of the Hugging Face Hub in the place of folders: a model fetched into the usual cache, a dataset read as a stream.

`HF_HOME` says where the cache is, `HF_HUB_OFFLINE=1` takes only what is in it, `HF_TOKEN` opens gated names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.hf.load import first_line, without_chatter

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Weights as safetensors alone, and the files beside them: no code is fetched, and no pickle."""
_CACHED = re.compile(r"models--(.+)")


def is_hub_name(path: Path) -> bool:
    """True for `owner/name` where no file or folder of that name is here."""
    return not path.exists() and _NAME.fullmatch(path.as_posix()) is not None and not path.suffix.startswith(".json")


def fetch_model(path: Path) -> Path:
    """A folder unchanged; for a name on the Hub, its snapshot in the cache, downloaded if allowed and missing."""
    if not is_hub_name(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        with without_chatter():
            return Path(snapshot_download(path.as_posix(), allow_patterns=_MODEL_FILES))
    except Exception as error:  # the library raises errors of its own, of HTTP and of the system
        raise _unreachable("model", path, error) from error


def hub_base(folder: Path) -> tuple[str, str | None]:
    """What an adapter names as its base: the Hub's name and revision of a snapshot in the cache, else the folder."""
    for parent in folder.parents:
        found = _CACHED.fullmatch(parent.name)
        if found is not None and folder.parent.name == "snapshots":
            return found.group(1).replace("--", "/", 1), folder.name
    return str(folder.resolve()), None


def stream_dataset(path: Path, split: str = "train") -> Iterator[tuple[str, Any]]:
    """The samples of a dataset of the Hub, each with its place, as they come."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "a dataset of the Hub needs the package datasets", seen=str(error), do="pip install 'truebatch[data]'"
        ) from error
    try:
        found = datasets.load_dataset(path.as_posix(), split=split, streaming=True)
    except Exception as error:  # the library raises errors of its own, of HTTP and of the system
        raise _unreachable("dataset", path, error) from error
    yield from ((f"{path.as_posix()}:{number}", sample) for number, sample in enumerate(found))


def _unreachable(what: str, path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path.as_posix()} is neither a file or folder here nor a {what} that can be fetched from the Hugging Face Hub",
        seen=f"{type(error).__name__}: {first_line(error)}",
        do=f"check the name, the network and HF_HUB_OFFLINE; elsewhere `hf download {path.as_posix()} --local-dir DIR`, then "
        "name DIR",
    )
