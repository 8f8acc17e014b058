"""Folders of adapters are checked before peft reads them: their settings can name modules to import, files to unpickle,
patterns without an end, and ranks that no memory holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from truebatch.errors import DataError
from truebatch.io.text_encoding import read_text

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_BYTES = 1 << 20
KIND = "LORA"
STARTS = ("gaussian", "orthogonal")
"""Ways to begin that need nothing but random numbers; the weights of the folder replace them."""
CHANGING = ("megatron_config", "layer_replication", "eva_config", "corda_config")
"""Settings that import a module, change the base model or read further files."""
_FIRST = (".lora_A.weight", ".lora_embedding_A")
"""Names of the matrices that have as many rows as the adapter has ranks."""
_MOST_REPEATS = 4
_NAME = re.compile(r"[\w.\-^$]*")
_NESTED = re.compile(r"[*+}?]\)+[*+{]|\\\d|\(\?P=")


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """The settings of an adapter; what is no JSON object raises `DataError`."""
    text = read_text(folder / ADAPTER, max_bytes=ADAPTER_BYTES)
    try:
        found = json.loads(text)
        return dict(found.items())
    except (ValueError, RecursionError, AttributeError) as error:
        raise DataError(
            f"{folder / ADAPTER} cannot be read",
            seen=f"{error!r}"[:200],
            do="save the adapter again with save_pretrained",
        ) from error


def check_adapter(folder: Path) -> None:
    """Refuse settings that a LoRA adapter, as peft saves it, does not need."""
    settings = read_adapter_settings(folder)
    most = _largest_rank(folder / WEIGHTS)
    for name, value, is_known in _checks(settings, most):
        if not is_known:
            raise DataError(
                f"the adapter in {folder} has a setting that is not read",
                seen=f"{name}={value!r}"[:200],
                do="save it as plain LoRA with save_pretrained: target_modules as a list of names, the rank of its weights",
            )


def _checks(settings: Mapping[str, Any], most: int) -> Iterator[tuple[str, Any, bool]]:
    """Name, value, and whether it may stand there."""
    yield "peft_type", settings.get("peft_type"), settings.get("peft_type") == KIND
    start = settings.get("init_lora_weights", True)
    yield "init_lora_weights", start, isinstance(start, bool) or start in STARTS
    for name in CHANGING:
        yield name, settings.get(name), not settings.get(name)
    patterns = [settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    yield "rank_pattern", patterns, all(isinstance(one, dict) for one in patterns)
    for name, rank in (("r", settings.get("r", 8)), *patterns[0].items()):
        yield name, rank, isinstance(rank, int) and 1 <= rank <= most
    for name in (*patterns[0], *patterns[1]):
        yield "rank_pattern", name, _NAME.fullmatch(name) is not None
    for name in ("target_modules", "exclude_modules", "layers_pattern", "target_parameters", "modules_to_save"):
        yield name, settings.get(name), _is_bounded(settings.get(name))


def _is_bounded(names: Any) -> bool:
    """A list of names, or a pattern whose search has an end."""
    if isinstance(names, str):
        repeats = len(re.findall(r"[*+]|\{\d*,\}", names))
        return repeats <= _MOST_REPEATS and len(names) < 2000 and _NESTED.search(names) is None
    return names is None or (isinstance(names, list) and all(isinstance(n, str) and _NAME.fullmatch(n) for n in names))


def _largest_rank(path: Path) -> int:
    """Of the matrices in the file; 0 where there are none."""
    try:
        with safe_open(str(path), framework="pt") as opened:
            names = [name for name in list(opened.keys()) if name.endswith(_FIRST)]
            ranks = [(opened.get_slice(name).get_shape() or [0])[0] for name in names]
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a whole safetensors file", seen=str(error)[:200], do="copy the adapter again"
        ) from error
    return max(ranks, default=0)
